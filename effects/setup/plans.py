"""Plans an engine's memory, for a context that is given or that fits."""

from pathlib import Path
from typing import Final

from attrs import evolve

from minfer.effects.models.adapters.slot_layout import slot_bytes
from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.ranks import RankInfo
from minfer.effects.setup.device import DeviceError, DeviceInfo
from minfer.effects.setup.draft_checkpoint import DraftCheckpoint, find_draft_checkpoint
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.engine_config import engine_config
from minfer.effects.setup.memory import MemoryPlan, NotEnoughMemoryError, plan_memory
from minfer.effects.setup.recurrent_layers import check_draft_layers
from minfer.effects.setup.speculation_settings import SpeculativeConfig
from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError

# Limits of the GPU's kernels.
_MAX_HEAD_DIM: Final = 256
_MAX_VOCAB_SIZE: Final = 1 << 20


def longest_fitting_context(
    args: EngineArgs,
    spec: ModelSpec,
    device: DeviceInfo,
    folder: Path,
    speculative: SpeculativeConfig | None,
    limit: int | None,
) -> int:
    """Returns the longest context, up to the model's, of which one sequence fits into
    memory. Raises as `prepare` if not even one of a block does.
    """

    def check(length: int) -> None:
        """Raise NotEnoughMemoryError if a context of that many tokens does not fit."""
        sized = evolve(args, max_model_len=length)
        config = engine_config(sized, spec, device, folder, speculative)
        draft = prepare_draft(args, spec, config, device, folder, speculative)
        memory_plans(args, spec, config, draft, device, limit)

    max_length = spec.original_context or spec.max_position_embeddings
    longest_fitting, shortest_failing = min(args.block_size, max_length), max_length + 1
    check(longest_fitting)
    while shortest_failing - longest_fitting > 1:  # the first half: most models fit whole
        middle = (
            max_length
            if shortest_failing > max_length
            else (longest_fitting + shortest_failing) // 2
        )
        try:
            check(middle)
        except NotEnoughMemoryError:
            shortest_failing = middle
        else:
            longest_fitting = middle
    return longest_fitting


def prepare_draft(
    args: EngineArgs,
    spec: ModelSpec,
    config: EngineConfig,
    device: DeviceInfo,
    folder: Path,
    speculative: SpeculativeConfig | None,
) -> DraftCheckpoint | None:
    """Returns the draft model, if there is one. Raises as `prepare`."""
    draft = find_draft_checkpoint(speculative, folder, spec, config)
    window = args.attention_window
    if draft is not None:
        check_draft_layers(draft.spec)
        draft = evolve(draft, spec=draft.spec.with_context(config.max_model_len))
    if draft is not None and window is not None:  # it reads the same block tables
        draft = _with_window(draft, window, args.attention_sink_tokens)
    if draft is not None and device.kind == "cuda":
        check_kernels(draft.spec, draft.folder)
    return draft


def _with_window(draft: DraftCheckpoint, window: int, sinks: int) -> DraftCheckpoint:
    """Returns a draft model with the target's attention window. Raises ConfigError."""
    own_window = max(
        (layer_window for layer_window in draft.spec.windows if layer_window is not None),
        default=0,
    )
    if own_window > window:
        raise ConfigError(
            f"draft model {draft.folder}: some of its layers read the last {own_window} "
            f"tokens, and blocks are released behind attention_window {window}; raise "
            "that, or choose another draft model"
        )
    try:
        narrow = with_attention_window(draft.spec, window, sinks)
    except ConfigError as error:
        raise ConfigError(f"draft model {draft.folder}: {error}") from None
    return evolve(draft, spec=narrow)


def memory_plans(
    args: EngineArgs,
    spec: ModelSpec,
    config: EngineConfig,
    draft: DraftCheckpoint | None,
    device: DeviceInfo,
    limit: int | None,
) -> list[MemoryPlan]:
    """Returns the memory plan of a rank of each stage. Raises NotEnoughMemoryError."""
    tiers = (args.kv_host_memory, args.kv_disk, args.kv_peers)
    ranks = [RankInfo(rank, args.parallel) for rank in args.parallel.first_ranks]
    specs = [spec.for_rank(rank) for rank in ranks]
    return [
        plan_memory(
            rank_spec,
            config,
            limit,
            kv_cache_memory=args.kv_cache_memory_bytes,
            num_blocks=args.num_gpu_blocks_override,
            cuda=device.kind == "cuda",
            draft=None if draft is None else draft.spec,
            tiers=sum(tier is not None for tier in tiers),
            adapters=_adapter_bytes(args, rank_spec),
        )
        for rank_spec in specs
    ]


def _adapter_bytes(args: EngineArgs, spec: ModelSpec) -> int:
    """Returns the bytes of the slots of adapters of a rank."""
    if not args.enable_lora:
        return 0
    return args.max_loras * slot_bytes(spec, args.max_lora_rank)


def check_kernels(spec: ModelSpec, folder: Path) -> None:
    """Refuse models beyond the limits of the GPU's kernels. Raises DeviceError."""
    attentions = [group.attention for group in spec.groups]
    head_dims = [
        attention.head_dim for attention in attentions if isinstance(attention, GQA)
    ]
    max_head_dim = max(head_dims, default=0)
    if max_head_dim > _MAX_HEAD_DIM:
        reason = (
            f"heads of {max_head_dim} dimensions are too wide for the GPU "
            f"(at most {_MAX_HEAD_DIM})"
        )
        raise DeviceError(f"{folder}: {reason}; run it on the CPU with --device cpu")
    if spec.vocab_size > _MAX_VOCAB_SIZE:
        reason = (
            f"the GPU's sampler takes {_MAX_VOCAB_SIZE} tokens at most, "
            f"not {spec.vocab_size}"
        )
        raise DeviceError(f"{folder}: {reason}; run it on the CPU with --device cpu")
