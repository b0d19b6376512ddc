"""How the ranks of an engine start: what rank 0 does, and what each other rank does.

    rank 0                                        another rank
    ------                                        ------------
    the process that opens the engine             `python -m minfer` (cli/main.py),
                                                  by rank 0 or torchrun
    start_ranks                                   follow_rank_0
      listen_in_new_folder    <-- connects ---      rank_folder_path, Leader.connect
      WorkerGroup
        .start_processes, but for torchrun's
                              --- settings -->      setup_from_settings
        .await_joined         <-- versions ---      Leader.join
      join_group              <- the others ->      join_group
    open_rank                 loads its part        open_rank
    WorkerGroup.await_ready   <-- is ready ---      run_rank_loop,
    WorkerGroup.broadcast     ---- items ---->      until the engine is closed

Settings, versions and items pass through a Unix socket in a folder (rank_folder.py), and
tensors through torch.distributed (torch_ranks.py). A rank that rank 0 has started ends
with it, as each child does (`minfer.effects.net.child`); one of torchrun's, with that.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, fields, frozen

from minfer.blocks.keys import Keys
from minfer.effects.execution.ranks.items import Want
from minfer.effects.execution.ranks.joining import RankListener
from minfer.effects.execution.ranks.rank_folder import (
    STORE_NAME,
    RankStartError,
    is_by_torchrun,
    new_rank_folder,
    rank_folder_path,
)
from minfer.effects.execution.ranks.worker_group import RankError, WorkerGroup
from minfer.effects.execution.tiers.peers.peer_plan import plan_from, plan_to
from minfer.effects.live.engine.open_rank import open_rank, open_store
from minfer.effects.models.ranks import Communicator, RankInfo
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import Setup, prepare_as_decided
from minfer.effects.setup.visible_gpus import VISIBLE_VARIABLE, visible_gpus
from minfer.version import __version__

if TYPE_CHECKING:
    from minfer.effects.execution.ranks.torch_ranks import TorchRanks

# Settings that only rank 0 has, as nothing that a rank computes depends on them.
RANK_0_SETTINGS: Final = (
    "scheduling_policy",
    "journal",
    "kv_disk",
    "kv_disk_secret",
    "lora_modules",
    "lora_registry",
)
BLOCKS, DEVICE = "num_blocks", "device"  # of rank 0, beside its settings
_log = logging.getLogger("minfer.executor")


# --- rank 0 -----------------------------------------------------------------------------


@frozen(eq=False)
class RankGroup:
    """What rank 0 needs of the other ranks."""

    ranks: Communicator
    workers: WorkerGroup

    def want(self, keys: Keys, engine: str) -> None:
        """Have the other ranks send their part of blocks to an engine, too."""
        with suppress(RankError):  # the engine ends
            self.workers.broadcast(Want(keys, engine))

    def close(self) -> None:
        """End the other ranks at once."""
        self.workers.abandon()
        self.ranks.leave()
        self.workers.remove_folder()


def start_ranks(setup: Setup) -> RankGroup:
    """Starts the other ranks of an engine, of which this process is rank 0. Raises
    RankStartError for those that do not come, or are not of the same engine.
    """
    count = setup.args.parallel.ranks
    workers = WorkerGroup(count, shared_facts(setup))
    try:
        listener = listen_in_new_folder(encode_settings(setup), workers.resources)
        with closing(listener):
            if not is_by_torchrun():
                workers.start_processes(listener.folder, environments(setup, count))
            workers.await_joined(listener)
        workers.watch()
        ranks = join_group(setup, RankInfo(0, setup.args.parallel), listener.folder)
    except BaseException:
        workers.abandon()
        workers.remove_folder()
        raise
    workers.on_loss.append(ranks.release)
    return RankGroup(ranks, workers)


def listen_in_new_folder(
    settings: Mapping[str, Any], resources: ExitStack
) -> RankListener:
    """Returns where the other ranks join, and get these settings, in a new folder that
    `resources` remove. Raises RankStartError.
    """
    try:
        folder = resources.enter_context(new_rank_folder())
        return RankListener(folder, settings)
    except OSError as error:
        raise RankStartError(f"the ranks cannot meet in a folder: {error}") from error


# --- another rank -----------------------------------------------------------------------


def follow_rank_0() -> int:
    """Be another rank, until rank 0 ends; returns the exit code. Rank 0 says what to do,
    whatever this process's command line says.
    """
    # Imports torch.
    from minfer.effects.execution.rank_loop import Leader, fail, run_rank_loop

    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for rank 0, which ends this one
    folder = rank_folder_path()
    leader = Leader.connect(folder, rank)
    setup = setup_from_settings(leader.settings)
    leader.join(shared_facts(setup))
    # So far torchrun ends this one, if rank 0 does not come.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ranks = join_group(setup, RankInfo(rank, setup.args.parallel), folder)
        executor = open_rank(setup, store=open_store(setup, rank), ranks=ranks)
        run_rank_loop(executor, leader)
        executor.close()
    except Exception as error:
        _log.exception("rank %d ends", rank)
        fail(leader, error)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


# --- each rank --------------------------------------------------------------------------


def join_group(setup: Setup, rank_info: RankInfo, folder: Path) -> "TorchRanks":
    """Joins the other ranks in torch.distributed, as they do at the same time; `folder`
    is where they meet. Raises RankStartError.
    """
    import torch

    from minfer.effects.execution.ranks.torch_ranks import RankGroupError, join_ranks
    from minfer.effects.models.dtypes import torch_dtype

    spec = setup.spec
    device, dtype = torch.device(setup.device.kind), torch_dtype(spec.dtype)
    try:
        ranks = join_ranks(
            rank_info, folder / STORE_NAME, device, spec.hidden_size, dtype
        )
    except RankGroupError as error:
        raise RankStartError(str(error)) from error
    if device.type == "cpu":
        return ranks
    from minfer.effects.execution.ranks.peer_ranks import with_peer_memory

    try:
        return with_peer_memory(ranks)
    except BaseException:
        ranks.leave()
        raise


def shared_facts(setup: Setup) -> Mapping[str, str]:
    """Returns the facts that must be equal on all ranks."""
    return {"version": __version__, "model or weights": setup.fingerprint.hex()}


def encode_settings(setup: Setup) -> Mapping[str, Any]:
    """Returns the settings of the other ranks, as JSON has them."""
    args = evolve(
        setup.args,
        model=str(setup.folder),
        tokenizer=str(setup.tokenizer_folder),
        revision=None,
        tokenizer_revision=None,
        download_dir=None,
    )
    names = [
        attribute.name
        for attribute in fields(EngineArgs)
        if attribute.name not in RANK_0_SETTINGS
    ]
    settings = {name: getattr(args, name) for name in names}
    if setup.speculative is not None:
        speculative = setup.speculative
        config = {
            attribute.name: getattr(speculative, attribute.name)
            for attribute in fields(type(speculative))
        }
        settings["speculative_config"] = config
    if args.kv_peers is not None:
        settings["kv_peers"] = plan_to(args.kv_peers)
    return {**settings, DEVICE: setup.device.kind, BLOCKS: setup.config.num_blocks}


def setup_from_settings(settings: Mapping[str, Any]) -> Setup:
    """Returns the setup of an engine of which this process is another rank. Raises as
    `prepare`.
    """
    args = {
        name: value for name, value in settings.items() if name not in (BLOCKS, DEVICE)
    }
    if args["kv_peers"] is not None:
        args["kv_peers"] = plan_from(args["kv_peers"])
    return prepare_as_decided(EngineArgs(**args), settings[DEVICE], settings[BLOCKS])


def environments(setup: Setup, count: int) -> list[Mapping[str, str]]:
    """Returns the variables of ranks 1 and on. Each sees its own GPU first, as the only
    one that it uses; on the CPU, its share of the threads.
    """
    if setup.device.kind == "cpu":
        threads = max(1, (os.cpu_count() or 1) // count)
        return [{"OMP_NUM_THREADS": str(threads)}] * (count - 1)
    gpus = visible_gpus()
    return [
        {VISIBLE_VARIABLE: ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])}
        for rank in range(1, count)
    ]
