"""Rotary position embedding (Su et al. 2021) and the ways of scaling it to longer
contexts.

Each pair of a head's dimensions turns at a frequency of its own. Scalings reduce the low
frequencies, by `factor`, and keep the high ones: `linear` (Chen et al. 2023) reduces all;
`llama3` and `yarn` (Peng et al. 2023) blend between frequencies that turn `slow` times
and `fast` times within the original context, llama3 by the number of turns, yarn by the
index of the frequency.
"""

import math
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Rope:
    """How positions become angles. `slow` and `fast` count turns within `original`
    tokens.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original: int = 0  # tokens of the context before scaling
    slow: float = 1.0
    fast: float = 32.0
    # Yarn: the indices between which it blends are rounded outwards.
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cosines and sines


def parse_rope(read: ConfigReader) -> tuple[Rope, int]:
    """Returns the rope of a whole config, and the resulting context in tokens.

    Both forms are read: `rope_parameters` (transformers 5), and `rope_scaling`, which has
    priority as it does there. The context is vLLM's: yarn scales
    `original_max_position_embeddings`, linear `max_position_embeddings`; llama3 is
    already scaled. transformers itself sets no limit.
    """
    context = read.size("max_position_embeddings")
    rope = _rope_object(read)
    kind = rope.config.get("rope_type", rope.config.get("type", "default"))
    for place in (rope, read):
        if place.positive("partial_rotary_factor", 1.0) != 1.0:
            raise place.refusal("partial_rotary_factor other than 1 is not supported")
    bases = rope if "rope_theta" in rope.config else read
    theta = bases.positive("rope_theta", 10000.0)
    # As in transformers: the outer one has priority.
    lengths = rope if read.absent("original_max_position_embeddings") else read
    original = lengths.size("original_max_position_embeddings", context)
    if kind == "default":
        return Rope(kind, theta), context
    if kind == "linear":
        factor = rope.positive("factor", low=1.0)
        return Rope(kind, theta, factor), int(factor * context)
    if kind == "llama3":
        return _llama3(rope, theta, original), context
    if kind == "yarn" and theta > 1:
        return _yarn(rope, theta, original, context)
    raise rope.refusal(
        f"rope scaling {kind!r} with base {theta:g} is not supported; default, linear, "
        f"llama3 and yarn (with a base above 1) are"
    )


def _rope_object(read: ConfigReader) -> ConfigReader:
    """Returns the object in a config that describes the scaling; it may be empty."""
    name = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    table = read.config.get(name)
    if table is not None and not isinstance(table, dict):
        raise read.error(name, "an object or null")
    rope = ConfigReader(table or {}, f"{read.where}: {name}")
    if any(isinstance(value, dict) for value in rope.config.values()):
        raise rope.refusal("rotary parameters for each kind of layer are not supported")
    return rope


def _llama3(rope: ConfigReader, theta: float, original: int) -> Rope:
    slow, fast = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if slow >= fast:
        raise rope.error("high_freq_factor", f"above low_freq_factor = {slow}")
    return Rope(
        kind="llama3",
        theta=theta,
        factor=rope.positive("factor", low=1.0),
        original=original,
        slow=slow,
        fast=fast,
    )


def _yarn(
    rope: ConfigReader, theta: float, original: int, context: int
) -> tuple[Rope, int]:
    factor = rope.positive("factor", max(1.0, context / original), 1.0)
    slow, fast = rope.positive("beta_slow", 1.0), rope.positive("beta_fast", 32.0)
    if slow > fast:
        raise rope.error("beta_fast", f"at least beta_slow = {slow}")
    over, under = 1.0, 0.0
    if rope.config.get("mscale") and rope.config.get("mscale_all_dim"):
        over, under = rope.positive("mscale"), rope.positive("mscale_all_dim")
    scale = (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)
    scale = rope.positive("attention_factor", scale)
    made = Rope(
        kind="yarn",
        theta=theta,
        factor=factor,
        original=original,
        slow=slow,
        fast=fast,
        truncate="truncate" not in rope.config or rope.flag("truncate"),
        attention_factor=scale,
    )
    return made, int(factor * original)


def inverse_frequencies(rope: Rope, head_dim: int) -> "Tensor":
    """Returns the radians that each pair of dimensions turns by per position: [head_dim /
    2] float32.

    Computed in the order of transformers, as rounding matters at position 10^5.
    """
    import torch

    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    if rope.kind == "llama3":
        turns = rope.original / (2 * math.pi / plain)
        keep = ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)
        return (1 - keep) * plain / rope.factor + keep * plain
    if rope.kind == "yarn":
        low, high = _yarn_band(rope, head_dim)
        keep = 1 - ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
        return 1.0 / (rope.factor * periods) * (1 - keep) + plain * keep
    return plain / rope.factor


def _yarn_band(rope: Rope, head_dim: int) -> tuple[float, float]:
    """Returns the indices of the frequencies, high ones first, between which yarn
    blends.
    """
    wide = [rope.original / (turns * 2 * math.pi) for turns in (rope.fast, rope.slow)]
    low, high = (head_dim * math.log(w) / (2 * math.log(rope.theta)) for w in wide)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:  # never an empty range
        high += 0.001
    return low, high
