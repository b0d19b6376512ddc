"""Opens what a setup describes: the executor, and the journal."""

import logging
import platform
import socket
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import attrs

from minfer.effects.execution.contract import Executor
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.execution.tiers.peers.peers import Peers
from minfer.effects.execution.warming.start_progress import (
    Report,
    ignore_progress,
)
from minfer.effects.execution.warming.start_progress import log as start_log
from minfer.effects.live.engine.host_drafts import (
    HostDrafts,
    HostDraftSource,
    NoHostDrafts,
)
from minfer.effects.live.engine.open_rank import first_line, open_rank
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.effects.setup.memory import NotEnoughMemoryError, size_text
from minfer.effects.setup.prepare import Setup
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError

_log = logging.getLogger("minfer.executor")
# versions in the journal
RECORDED_PACKAGES: Final = ("torch", "triton", "flash-attn-4", "quack-kernels")


def open_executor(
    setup: Setup,
    tokenizer: Tokenizer | None,
    report: Report = ignore_progress,
    store: KeyedStore | None = None,
) -> Executor:
    """Returns the executor of the settings, with its weights if it has any; `store` has
    the blocks of its external store.

    Progress is reported to `report`, from any thread. Raises CheckpointError if the
    weights cannot be used, and NotEnoughMemoryError.
    """
    vocab_size = setup.spec.vocab_size
    match setup.args.executor:
        case "oracle":
            from minfer.simulation.oracle import Oracle

            return Oracle(setup.config.block_size, vocab_size, setup.config.groups)
        case "dry":
            from minfer.effects.execution.dry_executor import DryExecutor, encoded_passage

            passage = () if tokenizer is None else encoded_passage(tokenizer.encode)
            return DryExecutor(passage or (tuple(range(vocab_size)),))
        case _:
            return _with_torch(setup, report, store)


def _with_torch(setup: Setup, report: Report, store: KeyedStore | None) -> Executor:
    """Returns the model's own executor; of several ranks, rank 0's, with the others'
    processes.
    """
    if setup.args.parallel.ranks == 1:
        return open_rank(setup, report, store)
    from minfer.effects.live.engine.ranks import start_ranks  # which few engines have

    group = start_ranks(setup)
    if isinstance(store, Peers):
        store.broadcast = group.want
    try:
        executor = open_rank(setup, report, store, group.ranks, group.workers)
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
    speculative, spec_config = setup.speculative, setup.config.speculation
    measure = getattr(executor, "step_costs", None)
    if (
        speculative is None
        or spec_config is None
        or not speculative.adaptive
        or measure is None
    ):
        return setup
    try:
        spec_config = attrs.evolve(spec_config, adaptive=True, costs=measure(spec_config))
    except (MemoryError, RuntimeError) as error:
        _log.warning("how many drafts pay cannot be found out: %r", error)
        return setup  # with the most drafts
    return attrs.evolve(setup, config=attrs.evolve(setup.config, speculation=spec_config))


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
            f"{size} of host memory for KV blocks cannot be had: {first_line(error)}; "
            f"make --kv-host-memory smaller"
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
    packages = RECORDED_PACKAGES if args.executor == "torch" else ()
    versions = {d.name: d.version for name in packages for d in distributions(name=name)}
    machine = {} if args.journal_redact else {"machine": socket.gethostname()}
    header = {
        "model": setup.folder.name if args.journal_redact else str(setup.folder),
        **machine,
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
        header,
        size=args.journal_size,
        redact=args.journal_redact,
    )


def host_drafts(setup: Setup) -> HostDraftSource:
    """Returns the maker of the host's drafts, by the settings."""
    speculative = setup.speculative
    proposer = None if speculative is None else speculative.proposer
    return NoHostDrafts() if proposer is None else HostDrafts(setup.config, proposer)
