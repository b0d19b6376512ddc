"""Plans an engine's memory, for a context that is given or that fits."""

from pathlib import Path
from typing import Final

from attrs import evolve

from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.ranks import Place
from minfer.effects.setup.device import DeviceError, DeviceInfo
from minfer.effects.setup.draft_checkpoint import DraftCheckpoint, find_draft_checkpoint
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.engine_config import engine_config
from minfer.effects.setup.memory import MemoryPlan, NotEnoughMemoryError, plan_memory
from minfer.effects.setup.speculation_settings import SpeculativeConfig
from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError

# Limits of the GPU's kernels.
_WIDEST_HEAD: Final = 256
_LARGEST_VOCABULARY: Final = 1 << 20


def fitting_length(
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
        draft = draft_of(args, spec, config, device, folder, speculative)
        memory_plans(args, spec, config, draft, device, limit)

    longest = spec.original_context or spec.max_position_embeddings
    fits, beyond = min(args.block_size, longest), longest + 1
    check(fits)
    while beyond - fits > 1:  # the first half: most models fit whole
        middle = longest if beyond > longest else (fits + beyond) // 2
        try:
            check(middle)
        except NotEnoughMemoryError:
            beyond = middle
        else:
            fits = middle
    return fits


def draft_of(
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
    if draft is not None and window is not None:  # it reads the same block tables
        draft = _with_window(draft, window, args.attention_sink_tokens)
    if draft is not None and device.kind == "cuda":
        check_kernels(draft.spec, draft.folder)
    return draft


def _with_window(draft: DraftCheckpoint, window: int, sinks: int) -> DraftCheckpoint:
    """Returns a draft model with the target's attention window. Raises ConfigError."""
    own = max((w for w in draft.spec.windows if w is not None), default=0)
    if own > window:
        raise ConfigError(
            f"draft model {draft.folder}: some of its layers read the last {own} tokens, "
            f"and blocks are released behind attention_window {window}; raise that, or "
            "choose another draft model"
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
    return [
        plan_memory(
            spec.for_rank(Place(first, args.parallel)),
            config,
            limit,
            kv_cache_memory=args.kv_cache_memory_bytes,
            num_blocks=args.num_gpu_blocks_override,
            cuda=device.kind == "cuda",
            draft=None if draft is None else draft.spec,
            tiers=sum(tier is not None for tier in tiers),
        )
        for first in range(0, args.parallel.ranks, args.parallel.tensor)
    ]


def check_kernels(spec: ModelSpec, folder: Path) -> None:
    """Refuse models beyond the limits of the GPU's kernels. Raises DeviceError."""
    attentions = [group.attention for group in spec.groups]
    heads = [one.head_dim for one in attentions if isinstance(one, GQA)]
    widest = max(heads, default=0)
    if widest > _WIDEST_HEAD:
        what = (
            f"heads of {widest} dimensions are too wide for the GPU "
            f"(at most {_WIDEST_HEAD})"
        )
        raise DeviceError(f"{folder}: {what}; run it on the CPU with --device cpu")
    if spec.vocab_size > _LARGEST_VOCABULARY:
        what = (
            f"the GPU's sampler takes {_LARGEST_VOCABULARY} tokens at most, "
            f"not {spec.vocab_size}"
        )
        raise DeviceError(f"{folder}: {what}; run it on the CPU with --device cpu")
