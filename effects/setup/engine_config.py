"""Computes the core's configuration from settings and a model."""

from pathlib import Path
from typing import Final

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import config_path
from minfer.effects.models.layout.cache_layout import (
    cache_layout,
    one_group,
    with_states,
)
from minfer.effects.models.layout.shapes import parameter_count
from minfer.effects.models.ranks import RankInfo
from minfer.effects.setup.device import DeviceInfo
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.option_values import resolve_policy
from minfer.effects.setup.recurrent_layers import state_keeping
from minfer.effects.setup.speculation_settings import SpeculativeConfig
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.speculation import DEVICE
from minfer.values.checks import ConfigError

DEFAULT_BATCHED_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
# On a CPU a step of scored prompt tokens takes up to 1.5 times as long as of others, and
# all decode rows wait for it.
SCORED_COST: Final = {"cpu": 2, "cuda": 1}
# Parameters times tokens of a step whose products take some 35 ms at 690 TFLOP/s (H200).
STREAMING_WORK: Final = 1.2e13
_BUDGET_MULTIPLE: Final = 512  # budgets are multiples of this
MS: Final = 1000.0  # milliseconds of a second


def engine_config(
    args: EngineArgs,
    spec: ModelSpec,
    device: DeviceInfo,
    folder: Path,
    speculative: SpeculativeConfig | None,
) -> EngineConfig:
    """Returns the core's configuration, without its number of blocks. Raises
    ConfigError.
    """
    longest = spec.max_position_embeddings
    length = args.max_model_len or spec.original_context or longest
    if length > longest:
        raise ConfigError(
            f"max_model_len {length} is longer than the {longest} tokens the model was "
            f"made for (max_position_embeddings in {config_path(folder)}); lower it"
        )
    groups = _groups(args, spec, speculative)
    budget = args.max_num_batched_tokens or _batched_tokens(args, spec, device)
    speculation = None if speculative is None else speculative.speculation
    return EngineConfig(
        # Until the memory plan sets it: a block, and a state if there is one.
        num_blocks=sum(group.pages for group in groups),
        block_size=args.block_size,
        max_model_len=length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        itl_target=_itl_target(args.itl_target),
        vocab_size=spec.vocab_size,
        depth=args.steps_in_flight,
        max_waiting=args.max_waiting,
        late_masks=True,
        scored_cost=SCORED_COST[device.kind],
        policy=resolve_policy(args.scheduling_policy),
        speculation=speculation,
        groups=groups,
        states=state_keeping(
            spec,
            args.block_size,
            speculation,
            budget,
            caches_prefixes=args.enable_prefix_caching,
        ),
        adapter_slots=args.adapter_slots,
    )


def _itl_target(target: float | str | None) -> float | None:
    """Returns the core's target for the time between tokens, in seconds."""
    if target is None or target == "none":
        return None
    return 0.0 if isinstance(target, str) else target / MS


def _groups(
    args: EngineArgs, spec: ModelSpec, speculative: SpeculativeConfig | None
) -> tuple[CacheGroup, ...]:
    """Returns the model's cache groups, a draft head's layer included; one for all layers
    where the device makes drafts: a draft model reads the target's tables, and the core
    plans its drafts for one group. Raises ConfigError if pages are too small for states.
    """
    drafts_on_device = (
        speculative is not None and speculative.speculation.drafter == DEVICE
    )
    spec = spec.with_head_layer()
    layout_of = one_group if drafts_on_device else cache_layout
    layout = layout_of(spec)
    if not spec.has_states:
        return layout.groups
    # Pages are those of a rank, as states are: all ranks have the same tables.
    ranks = [RankInfo(rank, args.parallel) for rank in args.parallel.first_ranks]
    specs = [spec.for_rank(rank) for rank in ranks]
    layouts = [
        with_states(layout_of(rank_spec), rank_spec, args.block_size)
        for rank_spec in specs
    ]
    pages = max(rank_layout.state_pages for rank_layout in layouts)
    return (*layout.groups, CacheGroup(state=True, pages=pages))


def _batched_tokens(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> int:
    """Returns the most tokens of a step, if the settings do not set it.

    Prompts are computed together with the next tokens of all decode rows, which wait for
    the whole step. If a GPU's outputs are streamed, the step's work is bounded.
    """
    default = DEFAULT_BATCHED_TOKENS[device.kind]
    if device.kind != "cuda" or not args.streaming:
        return default
    streaming_budget = (
        int(STREAMING_WORK / parameter_count(spec)) // _BUDGET_MULTIPLE * _BUDGET_MULTIPLE
    )
    return max(_BUDGET_MULTIPLE, min(default, streaming_budget))
