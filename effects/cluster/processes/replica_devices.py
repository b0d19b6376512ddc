"""What each of several engines gets of the machine: a GPU, or its share of a CPU."""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import CPU_SHARE
from minfer.effects.setup.visible_gpus import VISIBLE_VARIABLE, visible_gpus
from minfer.values.checks import ConfigError

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@frozen(kw_only=True)
class ReplicaDevice:
    """What an engine's process has of the machine, and of the server's folders."""

    number: int | None = None  # of the replica; None: it is the only one
    gpus: str = ""  # as CUDA names them; empty: whatever there is
    threads: int = 0  # of the CPU; 0: as many as torch takes
    memory: float = CPU_SHARE  # share of the CPU's, if the settings have none

    def take(self, args: EngineArgs) -> EngineArgs:
        """Have this process use the device, before it imports torch; returns the settings
        of the engine.
        """
        if self.number is None:
            return args
        os.environ.setdefault(THREADS_VARIABLE, str(self.threads))
        if self.gpus:
            os.environ[VISIBLE_VARIABLE] = self.gpus
        elif args.gpu_memory_utilization is None:
            args = evolve(args, gpu_memory_utilization=self.memory)
        if args.journal is None:
            return args
        return evolve(args, journal=Path(args.journal) / f"replica-{self.number}")


def replica_devices(engines: Sequence[EngineArgs]) -> list[ReplicaDevice]:
    """Returns the devices of engines with these settings: the GPUs that are visible, one
    for each of their ranks, or else the CPU. Raises ConfigError for fewer GPUs.
    """
    args, count = engines[0], len(engines)
    if count == 1:
        return [ReplicaDevice()]
    gpus = [] if args.device == "cpu" or args.executor != "torch" else visible_gpus()
    ends = [*accumulate(engine.parallel.ranks for engine in engines)]
    if len(gpus) < ends[-1] and (gpus or args.device == "cuda"):
        raise ConfigError(
            f"{count} engines need {ends[-1]} GPUs, and {len(gpus)} can be seen; use "
            "fewer (--replicas, or --prefill and --decode), or --device cpu"
        )
    return [
        ReplicaDevice(
            number=number,
            gpus=",".join(gpus[end - engines[number].parallel.ranks : end]),
            threads=max(1, _num_cores() // count),
            memory=CPU_SHARE / count,
        )
        for number, end in enumerate(ends)
    ]


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # where there is one
    return len(affinity(0)) if affinity else os.cpu_count() or 1
