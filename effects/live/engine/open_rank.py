"""Opens one rank's part of an engine, which may be all of it: the executor with its
weights, and the store of its KV blocks.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from minfer.effects.execution.contract import ExecutorError
from minfer.effects.execution.tiers.block_files import Signature
from minfer.effects.execution.tiers.block_folder import BlockFolder
from minfer.effects.execution.tiers.head_slices import HeadSlices
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.execution.tiers.peers.peers import Peers
from minfer.effects.execution.warming.start_progress import (
    WEIGHTS,
    Report,
    StartProgress,
    ignore_progress,
)
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.ranks import SINGLE_RANK, WHOLE_MODEL, Communicator, RankInfo
from minfer.effects.setup.draft_head_checkpoint import HeadCheckpoint
from minfer.effects.setup.memory import NotEnoughMemoryError, size_text
from minfer.effects.setup.model_source import with_overrides
from minfer.effects.setup.prepare import Setup
from minfer.effects.setup.tiers import disk_size
from minfer.sampling.logits import is_shaped
from minfer.sampling.reference_sampler import RowSampling

if TYPE_CHECKING:
    from minfer.effects.execution.ranks.worker_group import WorkerGroup
    from minfer.effects.execution.running.draft_model import LoadedDraft
    from minfer.effects.execution.running.head_model import LoadedHead
    from minfer.effects.execution.torch_executor import TorchExecutor
    from minfer.effects.execution.warming.warm_up import Readiness
    from minfer.effects.models.architecture.model import Model
    from minfer.effects.models.architecture.weights import Weights
    from minfer.effects.models.draft_heads.head_weights import DraftHeadWeights


def open_store(setup: Setup, rank: int = 0) -> KeyedStore | None:
    """Returns where a rank's part of the blocks of the external store is: other engines,
    or a folder, which is there; None: there is no such store.
    """
    args, groups = setup.args, setup.config.groups
    if (plan := args.kv_peers) is not None:
        sizes, rank_info = (
            (plan.prefill_ranks, plan.decode_ranks),
            RankInfo(rank, args.parallel),
        )
        slices = HeadSlices.of(
            rank_info, setup.spec.with_head_layer().cached_heads, sizes
        )
        if setup.spec.has_states:
            slices = HeadSlices.by_rank(rank_info)
        return Peers(plan, len(groups), slices, rank)
    if args.kv_disk is None:
        return None
    kept = setup.config.block_groups
    full_groups = [number for number, group in enumerate(kept) if not group.window]
    return BlockFolder(
        Path(args.kv_disk),
        disk_size(args),
        setup.device.kind,
        Signature(args.kv_disk_secret),
        groups=len(groups),
        probed=min(full_groups, default=0),
    )


def open_rank(
    setup: Setup,
    report: Report = ignore_progress,
    store: KeyedStore | None = None,
    ranks: Communicator = SINGLE_RANK,
    workers: "WorkerGroup | None" = None,
) -> "TorchExecutor":
    """Returns the model's own executor, on one of the `ranks`; rank 0 has the `workers`
    of the others. Raises CheckpointError if the weights cannot be used, and
    NotEnoughMemoryError, which names the purpose.
    """
    config, rank_info = setup.config, ranks.rank_info
    report(StartProgress(WEIGHTS, 0, 1))
    loaded = _load(setup, rank_info)
    report(StartProgress(WEIGHTS, 1, 1))
    try:
        from minfer.effects.execution.running.adapter_loader import AdapterRoom
        from minfer.effects.execution.torch_executor import TorchExecutor

        return TorchExecutor(
            attrs.evolve(config, depth=config.depth * setup.args.pipeline_parallel_size),
            setup.spec if rank_info == WHOLE_MODEL else setup.spec.for_rank(rank_info),
            loaded.weights,
            setup.device.kind,
            graphs=not setup.args.enforce_eager,
            checked=setup.args.check_steps,
            readiness=_readiness(setup, report),
            draft=loaded.draft,
            store=store,
            ranks=ranks,
            workers=workers,
            adapters=AdapterRoom(setup.spec, setup.args.max_lora_rank),
        )
    except ExecutorError:
        raise  # of another rank
    except (MemoryError, RuntimeError) as error:
        size = size_text(setup.memory.kv_cache)
        raise NotEnoughMemoryError(
            f"{config.num_blocks} KV blocks ({size}) cannot be had: "
            f"{first_line(error)}; ask for a smaller KV cache"
        ) from error


@frozen(eq=False)
class _Loaded:
    """The weights of one rank."""

    weights: "Weights | Model"
    draft: "LoadedDraft | LoadedHead | None"  # the drafter's


def _load(setup: Setup, rank_info: RankInfo) -> _Loaded:
    """Loads the weights of one rank. Raises CheckpointError and NotEnoughMemoryError."""
    import torch

    from minfer.effects.execution.running.draft_model import LoadedDraft
    from minfer.effects.execution.running.head_model import LoadedHead

    draft: LoadedDraft | LoadedHead | None = None
    try:
        weights = _weights(setup, setup.folder, setup.spec, rank_info)
        if (draft_setup := setup.draft) is not None:
            draft = LoadedDraft(
                draft_setup.spec, _weights(setup, draft_setup.folder, draft_setup.spec)
            )
        if setup.head is not None:
            draft = LoadedHead(_head_weights(setup, setup.head, rank_info))
    except (MemoryError, torch.OutOfMemoryError) as error:
        size = size_text(setup.memory.weights)
        raise NotEnoughMemoryError(
            f"weights of {size} do not fit beside what else is in memory: "
            f"{first_line(error)}; choose a smaller model"
        ) from error
    return _Loaded(weights, draft)


def _readiness(setup: Setup, report: Report) -> "Readiness":
    """Returns what the executor has ready before the first request."""
    from minfer.effects.execution.device.device_rows import SamplingNeeds, is_filtered
    from minfer.effects.execution.warming.warm_up import Readiness

    advised = RowSampling.of(setup.default_sampling_params(), 0, 0, frozenset())
    filtered = is_filtered(advised, setup.spec.vocab_size)
    return Readiness(
        report,
        SamplingNeeds(filtered, scored=False, shaped=is_shaped(advised)),
        grammars=not setup.args.skip_tokenizer_init,
        fewer_drafts=_may_have_fewer_drafts(setup),
    )


def _may_have_fewer_drafts(setup: Setup) -> bool:
    """Returns whether rows may have fewer drafts than the most: if their number is
    adaptive, or a proposer finds them.
    """
    speculative = setup.speculative
    return speculative is not None and (
        speculative.adaptive or speculative.proposer is not None
    )


def _weights(
    setup: Setup, folder: Path, spec: ModelSpec, rank_info: RankInfo = WHOLE_MODEL
) -> "Weights | Model":
    """Returns a model's weights, by the settings, on the device of the settings: those of
    one rank.
    """
    from minfer.effects.models.checkpoint.checkpoint import (
        load_weights,
        random_weights,
        read_config,
    )

    seed = setup.args.seed
    device = setup.device.kind
    dummy = setup.args.load_format == "dummy"
    if spec.parameters:
        from minfer.effects.execution.cpu.paged_attention import make_cache
        from minfer.effects.models.fallback import load_fallback

        raw = with_overrides(read_config(folder), setup.args.hf_overrides)
        drawn = seed if dummy else None
        return load_fallback(folder, raw, spec, make_cache, drawn, device)
    if dummy:
        return random_weights(spec, spec.dtype, seed, device, rank_info)
    return load_weights(folder, spec, spec.dtype, device, rank_info)


def _head_weights(
    setup: Setup, head: HeadCheckpoint, rank_info: RankInfo
) -> "DraftHeadWeights":
    """Returns a draft head's weights, by the settings: those of one rank."""
    from minfer.effects.models.draft_heads.head_files import load_head, random_head

    spec, args, device = setup.spec, setup.args, setup.device.kind
    if args.load_format == "dummy":
        return random_head(spec, head.spec, spec.dtype, args.seed, device, rank_info)
    return load_head(head.folder, spec, head.spec, spec.dtype, device, rank_info)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return str(error).partition("\n")[0]
