"""The ranks of an engine: their processes, and what they are told at the start.

Rank 0 is the process that opens the engine. It starts the others (rank_process.py), or
finds those that torchrun has started, and gives them its settings, from which each
prepares the same engine and loads its part of the model.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, fields, frozen

from minfer.blocks.keys import Keys
from minfer.effects.execution.ranks.crew import Crew, RankError
from minfer.effects.execution.ranks.items import Want
from minfer.effects.execution.ranks.rank_folder import STORE, RankStartError
from minfer.effects.execution.tiers.peers.peer_plan import plan_from, plan_to
from minfer.effects.models.ranks import ALONE, Place, Ranks
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import Setup, prepare_elsewhere
from minfer.effects.setup.visible_gpus import VISIBLE, visible_gpus
from minfer.version import __version__

if TYPE_CHECKING:
    from minfer.effects.execution.ranks.torch_ranks import TorchRanks

# Settings that only rank 0 has, as nothing that a rank computes depends on them.
OWN: Final = ("scheduling_policy", "journal", "kv_disk", "kv_disk_secret")
BLOCKS, DEVICE = "num_blocks", "device"  # of rank 0, beside its settings


@frozen(eq=False)
class RankGroup:
    """What a rank needs of the others."""

    ranks: Ranks = ALONE
    crew: Crew | None = None  # rank 0's

    def want(self, keys: Keys, engine: str) -> None:
        """Have the other ranks send their part of blocks to an engine, too."""
        if self.crew is not None:
            with suppress(RankError):  # the engine ends
                self.crew.tell(Want(keys, engine))

    def close(self) -> None:
        """End the other ranks at once."""
        if self.crew is not None:
            from minfer.effects.execution.ranks.torch_ranks import leave

            self.crew.abandon()
            leave()
            self.crew.remove_folder()


def start_ranks(setup: Setup) -> RankGroup:
    """Starts the other ranks of an engine, of which this process is rank 0. Raises
    RankStartError for those that do not come, or are not of the same engine.
    """
    count = setup.args.parallel.ranks
    crew = Crew.start(count, settings_to(setup), about(setup), environments(setup, count))
    try:
        ranks = join(setup, Place(0, setup.args.parallel), crew.folder)
    except BaseException:
        crew.abandon()
        crew.remove_folder()
        raise
    crew.lose = ranks.release
    return RankGroup(ranks, crew)


def join(setup: Setup, place: Place, folder: Path) -> "TorchRanks":
    """Joins the other ranks, which do the same; `folder` is where they meet. Raises
    RankStartError.
    """
    import torch

    from minfer.effects.execution.ranks.torch_ranks import RankGroupError, joined
    from minfer.effects.models.dtypes import torch_dtype

    spec = setup.spec
    device, dtype = torch.device(setup.device.kind), torch_dtype(spec.dtype)
    try:
        ranks = joined(place, folder / STORE, device, spec.hidden_size, dtype)
    except RankGroupError as error:
        raise RankStartError(str(error)) from error
    if device.type == "cpu":
        return ranks
    from minfer.effects.execution.ranks.peer_ranks import through_memory

    try:
        return through_memory(ranks)
    except BaseException:
        ranks.leave()
        raise


def about(setup: Setup) -> Mapping[str, str]:
    """What must be alike on all ranks."""
    return {"version": __version__, "model or weights": setup.fingerprint.hex()}


def settings_to(setup: Setup) -> Mapping[str, Any]:
    """The settings of the other ranks, as JSON has them."""
    args = evolve(setup.args, model=str(setup.folder))
    names = [one.name for one in fields(EngineArgs) if one.name not in OWN]
    found = {name: getattr(args, name) for name in names}
    if setup.speculative is not None:
        how = setup.speculative
        known = {one.name: getattr(how, one.name) for one in fields(type(how))}
        found["speculative_config"] = known
    if args.kv_peers is not None:
        found["kv_peers"] = plan_to(args.kv_peers)
    return {**found, DEVICE: setup.device.kind, BLOCKS: setup.config.num_blocks}


def settings_from(found: Mapping[str, Any]) -> Setup:
    """The setup of an engine of which this process is another rank. Raises as
    `prepare`.
    """
    rest = {k: v for k, v in found.items() if k not in (BLOCKS, DEVICE)}
    if rest["kv_peers"] is not None:
        rest["kv_peers"] = plan_from(rest["kv_peers"])
    return prepare_elsewhere(EngineArgs(**rest), found[DEVICE], found[BLOCKS])


def environments(setup: Setup, count: int) -> list[Mapping[str, str]]:
    """The variables of ranks 1 and on. Each sees its own GPU first, as the only one that
    it uses; on the CPU, its share of the threads.
    """
    if setup.device.kind == "cpu":
        threads = max(1, (os.cpu_count() or 1) // count)
        return [{"OMP_NUM_THREADS": str(threads)}] * (count - 1)
    gpus = visible_gpus()
    return [
        {VISIBLE: ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])}
        for rank in range(1, count)
    ]
