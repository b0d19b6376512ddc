"""Rotary position embedding (Su et al. 2021) and the ways of scaling it to longer
contexts.

Each pair of a head's dimensions turns at a frequency of its own. Scalings reduce the low
frequencies, by `factor`, and keep the high ones: `linear` (Chen et al. 2023) reduces all;
`llama3` and `yarn` (Peng et al. 2023) blend between frequencies that turn `slow` times
and `fast` times within the original context, llama3 by the number of turns, yarn by the
index of the frequency. `longrope` (Ding et al. 2024) divides each frequency by a factor
of its own, and has other factors for contexts longer than the original one; which of the
two sets the whole engine has follows from its context. `dynamic` with a fixed alpha
(Hunyuan) multiplies the base, which divides the lowest frequency by alpha, and keeps the
highest one. `proportional` (Gemma 4) turns a share of the pairs, the fast ones, by the
frequencies that they have among all. Layers without rotation have a rope of type `none`,
whose angles are all 0, so that the same kernels serve them.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from minfer.effects.models.config_reader import ConfigReader, ModelConfigError
from minfer.effects.models.families.attention_keys import RopeBases

if TYPE_CHECKING:
    from torch import Tensor

# Keys of the object that describes a scaling, in configs of all types and of each.
_KEYS: Final = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    | {"original_max_position_embeddings", "max_position_embeddings"}
)
_YARN: Final = frozenset(
    {"factor", "attention_factor", "beta_fast", "beta_slow", "truncate"}
    | {"mscale", "mscale_all_dim"}
)
KEYS_OF: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    # All but alpha are in published configs, and nobody reads them beside it.
    "dynamic": frozenset(
        {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    ),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": _YARN,
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "proportional": frozenset({"factor"}),
}
# Those of all types of transformers, which families outside the table have.
ALL_KEYS: Final = _KEYS.union(*KEYS_OF.values(), ("short_mscale", "long_mscale"))
LONGROPE_NAMES: Final = ("longrope", "su", "yarn")  # in configs of Phi-3
# Of Mistral's configs, in that object: how much queries grow with their positions.
SCALING_BETA: Final = "llama_4_scaling_beta"
FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types in a config
CHUNKED = "chunked_attention"  # and of Llama 4
KINDS: Final = (FULL, SLIDING)
# Of longrope, above and below which frequencies would not be finite.
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e12


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
    partial: float = 1.0  # share of a head's dimensions that are rotated: the first ones
    interleaved: bool = False  # pairs are neighbours; else the two halves are paired
    # Longrope: what divides each frequency, in contexts of up to `original` tokens, and
    # in longer ones, if the engine has such.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Returns the number of a head's dimensions that are rotated; proportional ropes
        have frequencies for all, which are 0 for some.
        """
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial)

    def order(self, head_dim: int) -> list[int] | None:
        """Returns a head's dimensions in the order in which minfer stores queries and
        keys, so that halves of the head are paired, whatever the model pairs; None: they
        are in that order. Scores do not depend on the order.

        Dimensions that do not turn are pairs of angle zero.
        """
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim == head_dim and not self.interleaved:
            return None
        step = 2 if self.interleaved else 1
        partner_offset = 1 if self.interleaved else rotary_dim // 2
        first_half = [*range(0, rotary_dim * step // 2, step)]
        unrotated = [*range(rotary_dim, head_dim)]
        half = len(unrotated) // 2
        second_half = [dimension + partner_offset for dimension in first_half]
        return first_half + unrotated[:half] + second_half + unrotated[half:]


UNROTATED: Final = Rope(kind="none")


def parse_ropes(
    reader: ConfigReader,
    *,
    bases: RopeBases | None = None,
    partial: bool = False,
    longrope: bool = False,
    further_keys: frozenset[str] = frozenset(),
    default: Mapping[str, Any] | None = None,
    alpha: bool = False,
) -> tuple[dict[str, Rope], int]:
    """Returns the rope of each kind of layers, and the context in tokens.

    `bases`: each kind has its own (Gemma 3), in transformers 5's form, or in the older
    one, whose scaling is that of full attention. The context is already scaled there.
    `further_keys`: those that the object about it has besides, which others read.
    `default` is what a config without such an object has.
    """
    if bases is None:
        rope, context = parse_rope(
            reader,
            partial=partial,
            longrope=longrope,
            further_keys=further_keys,
            alpha=alpha,
        )
        return dict.fromkeys(KINDS, rope), context
    tables = _by_kind(reader, "rope_parameters") or default or {}
    thetas = {
        FULL: (reader.config.get("rope_theta"), bases.full),
        SLIDING: (reader.config.get(bases.sliding_key), bases.sliding),
    }
    scaling = reader.config.get("rope_scaling")
    if not isinstance(scaling, dict | None):
        raise reader.error("rope_scaling", "an object or null")
    ropes = {}
    for kind in KINDS:
        table = dict(tables.get(kind) or {})
        if kind == FULL:
            table |= scaling or {}
        found = (table.get("rope_theta"), *thetas[kind])
        theta = next(value for value in found if value is not None)
        # An outer original context is of configs with one rope, in transformers too.
        outer = {"rope_scaling": None, "original_max_position_embeddings": None}
        kind_config = {**reader.config, **outer}
        kind_config["rope_parameters"] = {**table, "rope_theta": theta}
        if bases.own_shares:
            kind_config["partial_rotary_factor"] = None
        of_kind = ConfigReader(kind_config, f"{reader.source}: {kind}")
        ropes[kind] = parse_rope(of_kind, partial=partial)[0]
    return ropes, reader.size("max_position_embeddings")


def _by_kind(reader: ConfigReader, name: str) -> Mapping[str, Any]:
    """Returns an object of a config that has an object for each kind of layers; it may be
    empty. Raises `ModelConfigError` for anything else in it.
    """
    tables = reader.config.get(name) or {}
    if not isinstance(tables, dict):
        raise reader.error(name, "an object or null")
    inner = ConfigReader(tables, f"{reader.source}: {name}")
    for key, table in tables.items():
        if table is not None and key not in KINDS:
            raise ModelConfigError(
                f"{inner.source}: {key} is not known; this model has an object for each "
                f"of {', '.join(KINDS)} there"
            )
        if not isinstance(table, dict | None):
            raise inner.error(key, "an object or null")
    return tables


def parse_rope(
    reader: ConfigReader,
    *,
    partial: bool = False,
    longrope: bool = False,
    further_keys: frozenset[str] = frozenset(),
    alpha: bool = False,
) -> tuple[Rope, int]:
    """Returns the rope of a whole config, and the resulting context in tokens. `partial`:
    a part of a head's dimensions may turn. `longrope`: that is the only scaling, whatever
    its name. `further_keys` are as in `parse_ropes`. `alpha`: type dynamic may have a
    fixed one.

    Both forms are read: `rope_parameters` (transformers 5), and `rope_scaling`, which has
    priority as it does there. The context is vLLM's: yarn scales
    `original_max_position_embeddings`, linear `max_position_embeddings`; llama3 is
    already scaled. transformers itself sets no limit.
    """
    context = reader.size("max_position_embeddings")
    rope = rope_object(reader)
    kind = rope.config.get("rope_type", rope.config.get("type", "default"))
    if longrope:
        kind = _longrope_or_default(rope, kind)
    _check_keys(rope, kind, further_keys)
    bases = rope if "rope_theta" in rope.config else reader
    theta = bases.positive("rope_theta", 10000.0)
    # As in transformers: the outer one has priority.
    lengths = rope if reader.is_absent("original_max_position_embeddings") else reader
    original = lengths.size("original_max_position_embeddings", context)
    share = _rotated_share(rope, reader)
    if share != 1 and not partial and kind != "proportional":
        raise _unknown(rope, f"partial_rotary_factor {share} is")
    if kind == "default":
        return Rope(kind, theta, partial=share), context
    if kind == "linear":
        factor = rope.positive("factor", low=1.0)
        return Rope(kind, theta, factor, partial=share), int(factor * context)
    if kind == "proportional":
        return Rope(kind, theta, rope.positive("factor", 1.0), partial=share), context
    if kind == "dynamic" and alpha and rope.config.get("alpha"):
        return Rope(kind, theta, rope.positive("alpha"), partial=share), context
    if kind == "llama3":
        return evolve(_llama3(rope, theta, original), partial=share), context
    if kind == "longrope" and longrope:
        return evolve(_longrope(rope, theta, original, context), partial=share), context
    if kind == "yarn" and theta > 1:
        yarn, scaled_context = _yarn(rope, theta, original, context)
        return evolve(yarn, partial=share), scaled_context
    raise rope.refusal(
        f"rope scaling {kind!r} with base {theta:g} is not supported; default, "
        "proportional, linear, llama3 and yarn (with a base above 1) are"
    )


def _longrope_or_default(rope: ConfigReader, kind: object) -> str:
    """Returns the type of a scaling of a model that has longrope alone. Raises
    `UnsupportedModelError` for another one.
    """
    if kind in LONGROPE_NAMES:
        return "longrope"
    if kind != "default":
        raise rope.refusal(
            f"rope scaling {kind!r} is not known to this model; default and longrope are"
        )
    return "default"


def _check_keys(rope: ConfigReader, kind: object, further_keys: frozenset[str]) -> None:
    """Refuse keys that a scaling of this type does not have: nothing is computed as if
    they were not there. Raises `ModelConfigError`.
    """
    type_keys = KEYS_OF.get(str(kind))
    if type_keys is None:
        return  # the type is refused
    known = _KEYS | type_keys | further_keys
    for key in sorted(map(str, rope.config.keys() - known)):
        if not rope.is_absent(key):
            fault = f"{key} is not a key of rotary scaling of type {kind!r}"
            raise ModelConfigError(
                f"{rope.source}: {fault}, which has "
                f"{', '.join(sorted(known))}; correct its name, or remove it"
            )


def _rotated_share(rope: ConfigReader, reader: ConfigReader) -> float:
    """Returns the share of a head's dimensions that turn."""
    key = "partial_rotary_factor"
    source = rope if key in rope.config else reader
    share = source.positive(key, 1.0)
    if share > 1:
        raise source.error(key, "at most 1")
    return share


def rope_object(reader: ConfigReader) -> ConfigReader:
    """Returns the object in a config that describes the scaling; it may be empty."""
    name = "rope_scaling" if reader.config.get("rope_scaling") else "rope_parameters"
    table = reader.config.get(name)
    if table is not None and not isinstance(table, dict):
        raise reader.error(name, "an object or null")
    rope = ConfigReader(table or {}, f"{reader.source}: {name}")
    if any(isinstance(value, dict) for value in rope.config.values()):
        raise _unknown(rope, "rotary parameters for each kind of layer are")
    return rope


def _unknown(rope: ConfigReader, fault: str) -> ModelConfigError:
    """Returns the error about what transformers' class ignores, too, so that it is not
    tried instead.
    """
    return ModelConfigError(
        f"{rope.source}: {fault} not known to this model; remove it, or correct "
        f"model_type"
    )


def _llama3(rope: ConfigReader, theta: float, original: int) -> Rope:
    slow, fast = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if slow > fast:
        raise rope.error("high_freq_factor", f"at least low_freq_factor = {slow}")
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
    mscale, mscale_all_dim = 1.0, 0.0
    if rope.config.get("mscale") and rope.config.get("mscale_all_dim"):
        mscale, mscale_all_dim = rope.positive("mscale"), rope.positive("mscale_all_dim")
    upper = 0.1 * mscale * math.log(factor) + 1.0
    scale = upper / (0.1 * mscale_all_dim * math.log(factor) + 1.0)
    scale = rope.positive("attention_factor", scale)
    yarn = Rope(
        kind="yarn",
        theta=theta,
        factor=factor,
        original=original,
        slow=slow,
        fast=fast,
        truncate="truncate" not in rope.config or rope.flag("truncate"),
        attention_factor=scale,
    )
    return yarn, int(factor * original)


def _longrope(rope: ConfigReader, theta: float, original: int, context: int) -> Rope:
    factor = rope.positive("factor", context / original)
    scale = 1.0
    if factor > 1 and original > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        kind="longrope",
        theta=theta,
        factor=factor,
        original=original,
        attention_factor=rope.positive("attention_factor", scale),
        short_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
    )


def _factors(rope: ConfigReader, key: str) -> tuple[float, ...]:
    """Returns a list of positive numbers. Raises `ModelConfigError`."""
    numbers = rope.config.get(key)
    if not isinstance(numbers, list) or not all(
        type(number) in (int, float) and MIN_FACTOR <= number <= MAX_FACTOR
        for number in numbers
    ):
        raise rope.error(key, "a list of positive numbers")
    return tuple(map(float, numbers))


def softmax_factor(reader: ConfigReader) -> float:
    """Returns the factor of DeepSeek's yarn for attention scores; that for cosines and
    sines is another one."""
    rope_reader = rope_object(reader)
    kind = rope_reader.config.get("rope_type", rope_reader.config.get("type", "default"))
    if kind == "default" or not rope_reader.config.get("mscale_all_dim"):
        return 1.0
    mscale_all_dim, factor = (
        rope_reader.positive("mscale_all_dim"),
        rope_reader.positive("factor"),
    )
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def inverse_frequencies(rope: Rope, head_dim: int) -> "Tensor":
    """Returns the radians that each pair of dimensions turns by per position: [head_dim /
    2] float32, 0 for those that do not turn.

    Computed in the order of transformers, as rounding matters at position 10^5.
    """
    import torch

    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    if rope.kind == "proportional":
        rotated = int(rope.partial * head_dim // 2)
        exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / rope.theta**exponents / rope.factor
        return torch.nn.functional.pad(frequencies, (0, head_dim // 2 - rotated))
    if rope.partial != 1:
        rotary_dim = rope.rotary_dim(head_dim)
        frequencies = inverse_frequencies(evolve(rope, partial=1.0), rotary_dim)
        return torch.nn.functional.pad(frequencies, (0, (head_dim - rotary_dim) // 2))
    if rope.kind == "dynamic":
        theta = rope.theta * rope.factor ** (head_dim / (head_dim - 2))
        return inverse_frequencies(Rope(theta=theta), head_dim)
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.is_long else rope.short_factors
        return 1.0 / (torch.tensor(factors) * periods)
    unscaled = 1.0 / periods
    if rope.kind == "llama3":
        turns = rope.original / (2 * math.pi / unscaled)
        if rope.slow == rope.fast:  # Llama 4: there is nothing to blend
            return torch.where(turns > rope.slow, unscaled, unscaled / rope.factor)
        keep = ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)
        return (1 - keep) * unscaled / rope.factor + keep * unscaled
    if rope.kind == "yarn":
        low, high = _yarn_band(rope, head_dim)
        keep = 1 - ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
        return 1.0 / (rope.factor * periods) * (1 - keep) + unscaled * keep
    return unscaled / rope.factor


def _yarn_band(rope: Rope, head_dim: int) -> tuple[float, float]:
    """Returns the indices of the frequencies, high ones first, between which yarn
    blends.
    """
    wavelengths = [
        rope.original / (turns * 2 * math.pi) for turns in (rope.fast, rope.slow)
    ]
    low, high = (
        head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
        for wavelength in wavelengths
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:  # never an empty range
        high += 0.001
    return low, high
