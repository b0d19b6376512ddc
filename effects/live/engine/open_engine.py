"""Opens what a setup describes: the executor with its weights, and the journal."""

import logging
import platform
import socket
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from minfer.effects.execution.contract import Executor, ExecutorError
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
from minfer.effects.execution.warming.start_progress import log as start_log
from minfer.effects.live.engine.host_drafts import (
    HostDrafts,
    HostDraftSource,
    NoHostDrafts,
)
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.effects.models.ranks import WHOLE, Place
from minfer.effects.models.spec import ModelSpec
from minfer.effects.setup.memory import NotEnoughMemoryError, size_text
from minfer.effects.setup.prepare import Setup
from minfer.effects.setup.tiers import disk_size
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.config import EngineConfig
from minfer.sampling.logits import is_shaped
from minfer.sampling.reference_sampler import RowSampling
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from minfer.effects.execution.torch_executor import TorchExecutor
    from minfer.effects.live.engine.ranks import RankGroup
    from minfer.effects.models.model import Model
    from minfer.effects.models.weights import Weights


_log = logging.getLogger("minfer.executor")
# versions in the journal
RECORDED: Final = ("torch", "triton", "flash-attn-4", "quack-kernels")


def open_store(setup: Setup, rank: int = 0) -> KeyedStore | None:
    """Returns where a rank's part of the blocks of the keyed tier is: other engines, or a
    folder, which is there; None: there is no such tier.
    """
    args, groups = setup.args, setup.config.groups
    if (plan := args.kv_peers) is not None:
        sizes, place = (plan.prefill_ranks, plan.decode_ranks), Place(rank, args.parallel)
        slices = HeadSlices.of(place, setup.spec.cached_heads, sizes)
        return Peers(plan, len(groups), slices, rank)
    if args.kv_disk is None:
        return None
    whole = [number for number, group in enumerate(groups) if not group.window]
    return BlockFolder(
        Path(args.kv_disk),
        disk_size(args),
        setup.device.kind,
        Signature(args.kv_disk_secret),
        groups=len(groups),
        probed=min(whole, default=0),
    )


def open_executor(
    setup: Setup,
    tokenizer: Tokenizer | None,
    report: Report = ignore_progress,
    store: KeyedStore | None = None,
) -> Executor:
    """Returns the executor of the settings, with its weights if it has any; `store` has
    the blocks of its keyed tier.

    Progress is reported to `report`, from any thread. Raises CheckpointError if the
    weights cannot be used, and NotEnoughMemoryError.
    """
    vocab_size = setup.spec.vocab_size
    match setup.args.executor:
        case "oracle":
            from minfer.runs.oracle import Oracle

            return Oracle(setup.config.block_size, vocab_size, setup.config.groups)
        case "dry":
            from minfer.effects.execution.dry_executor import Dry, encoded_passage

            spelled = () if tokenizer is None else encoded_passage(tokenizer.encode)
            return Dry(spelled or (tuple(range(vocab_size)),))
        case _:
            return _with_torch(setup, report, store)


def _with_torch(setup: Setup, report: Report, store: KeyedStore | None) -> Executor:
    """Returns the model's own executor; of several ranks, rank 0's, with the others'
    processes.
    """
    # Imports torch.
    from minfer.effects.live.engine.ranks import RankGroup, start_ranks

    if setup.args.parallel.ranks == 1:
        return open_rank(setup, RankGroup(), report, store)
    group = start_ranks(setup)
    if isinstance(store, Peers):
        store.tell = group.want
    try:
        executor = open_rank(setup, group, report, store)
    except BaseException:
        group.close()
        raise
    stages = setup.args.pipeline_parallel_size
    if stages == 1:
        return executor
    from minfer.effects.execution.ranks.micro_batches import MicroBatchExecutor

    return MicroBatchExecutor(executor, stages, setup.spec.vocab_size)


def with_costs(setup: Setup, executor: Executor) -> Setup:
    """Returns the setup with the measured costs of steps on its device, if the number of
    drafts is adaptive. An executor that computes nothing has no costs.
    """
    setup = _with_tier_costs(setup, executor)
    speculative, how = setup.speculative, setup.config.speculation
    measure = getattr(executor, "step_costs", None)
    if speculative is None or how is None or not speculative.adaptive or measure is None:
        return setup
    try:
        how = attrs.evolve(how, adaptive=True, costs=measure(how))
    except (MemoryError, RuntimeError) as error:
        _log.warning("how many drafts pay cannot be found out: %r", error)
        return setup  # with the most drafts
    return attrs.evolve(setup, config=attrs.evolve(setup.config, speculation=how))


def _with_tier_costs(setup: Setup, executor: Executor) -> Setup:
    """Returns the setup with the measured costs of loads from its tiers. Raises
    NotEnoughMemoryError, and ConfigError for a folder that cannot be used.
    """
    measure = getattr(executor, "tier_costs", None)
    if not setup.config.has_tiers or measure is None:
        return setup
    try:
        config: EngineConfig = measure(setup.config)
    except ConfigError:
        executor.close()
        raise
    except (MemoryError, RuntimeError) as error:
        executor.close()
        size = size_text(setup.args.kv_host_memory or 0)
        raise NotEnoughMemoryError(
            f"{size} of host memory for KV blocks cannot be had: {_line(error)}; make "
            f"--kv-host-memory smaller"
        ) from error
    setup = attrs.evolve(setup, config=config)
    for name, text in setup.described_tiers():
        start_log.info("%s: %s", name, text)
    return setup


def open_journal(setup: Setup, executor: Executor) -> JournalWriter | None:
    """Returns the journal of the settings. Raises ConfigError if it cannot be written."""
    args = setup.args
    if args.journal is None:
        return None
    packages = RECORDED if args.executor == "torch" else ()
    versions = {d.name: d.version for name in packages for d in distributions(name=name)}
    where = {} if args.journal_redact else {"machine": socket.gethostname()}
    about = {
        "model": setup.folder.name if args.journal_redact else str(setup.folder),
        **where,
        "dtype": setup.spec.dtype,
        "executor": args.executor,
        "device": setup.device.name,
        "fingerprint": setup.fingerprint.hex(),
        "seed": args.seed,
        "eager": args.enforce_eager,
        "kernels": dict(getattr(executor, "routes", ())),
        "versions": {"python": platform.python_version(), **versions},
    }
    return JournalWriter(
        Path(args.journal),
        setup.config,
        about,
        size=args.journal_size,
        redact=args.journal_redact,
    )


def host_drafts(setup: Setup) -> HostDraftSource:
    """Returns the maker of the host's drafts, by the settings."""
    speculative = setup.speculative
    proposer = None if speculative is None else speculative.proposer
    return NoHostDrafts() if proposer is None else HostDrafts(setup.config, proposer)


def open_rank(
    setup: Setup,
    group: "RankGroup",
    report: Report = ignore_progress,
    store: KeyedStore | None = None,
) -> "TorchExecutor":
    """Returns the model's own executor, on one of the ranks. Raises CheckpointError if
    the weights cannot be used, and NotEnoughMemoryError, which names the purpose.
    """
    import torch

    from minfer.effects.execution.running.draft_model import LoadedDraft

    config, place = setup.config, group.ranks.place
    needs = setup.memory
    report(StartProgress(WEIGHTS, 0, 1))
    try:
        weights = _weights(setup, setup.folder, setup.spec, place)
        draft = None
        if setup.draft is not None:
            of = setup.draft
            draft = LoadedDraft(of.spec, _weights(setup, of.folder, of.spec))
    except (MemoryError, torch.OutOfMemoryError) as error:
        size = size_text(needs.weights)
        raise NotEnoughMemoryError(
            f"weights of {size} do not fit beside what else is in memory: "
            f"{_line(error)}; choose a smaller model"
        ) from error
    report(StartProgress(WEIGHTS, 1, 1))
    try:
        from minfer.effects.execution.device.device_rows import Wants, is_filtered
        from minfer.effects.execution.torch_executor import TorchExecutor
        from minfer.effects.execution.warming.warm_up import Readiness

        advised = RowSampling.of(setup.default_sampling_params(), 0, 0, frozenset())
        filtered = is_filtered(advised, setup.spec.vocab_size)
        likely = Wants(filtered, scored=False, shaped=is_shaped(advised))
        return TorchExecutor(
            attrs.evolve(config, depth=config.depth * setup.args.pipeline_parallel_size),
            setup.spec if place == WHOLE else setup.spec.for_rank(place),
            weights,
            setup.device.kind,
            graphs=not setup.args.enforce_eager,
            checked=setup.args.check_steps,
            readiness=Readiness(
                report,
                likely,
                grammars=not setup.args.skip_tokenizer_init,
                fewer_drafts=_may_have_fewer_drafts(setup),
            ),
            draft=draft,
            store=store,
            ranks=group.ranks,
            crew=group.crew,
        )
    except ExecutorError:
        raise  # of another rank
    except (MemoryError, RuntimeError) as error:
        size = size_text(needs.kv_cache)
        raise NotEnoughMemoryError(
            f"{config.num_blocks} KV blocks ({size}) cannot be had: "
            f"{_line(error)}; ask for a smaller KV cache"
        ) from error


def _may_have_fewer_drafts(setup: Setup) -> bool:
    """Returns whether rows may have fewer drafts than the most: if their number is
    adaptive, or a proposer finds them.
    """
    speculative = setup.speculative
    return speculative is not None and (
        speculative.adaptive or speculative.proposer is not None
    )


def _weights(
    setup: Setup, folder: Path, spec: ModelSpec, place: Place = WHOLE
) -> "Weights | Model":
    """Returns a model's weights, by the settings, on the device of the settings: those of
    one rank.
    """
    from minfer.effects.models.checkpoint import load_weights, random_weights, read_config

    seed = setup.args.seed
    device = setup.device.kind
    dummy = setup.args.load_format == "dummy"
    if spec.parameters:
        from minfer.effects.execution.cpu.paged_attention import make_cache
        from minfer.effects.models.fallback import load_fallback

        raw = read_config(folder)
        drawn = seed if dummy else None
        return load_fallback(folder, raw, spec, make_cache, drawn, device)
    if dummy:
        return random_weights(spec, spec.dtype, seed, device, place)
    return load_weights(folder, spec, spec.dtype, device, place)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
