"""What is said between the keeper of engines, an actor, and the engine in its process."""

from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

from minfer.effects.execution.tiers.peers.addresses import Port
from minfer.effects.serving.processes.replica_devices import ReplicaDevice
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import CPU_SHARE

LAST: Final = 5.0  # seconds that an engine has to end in
CANNOT_START: Final = 2  # exit code: as of all commands, for what the user can mend
# What an engine reports, a line of each, with:
KV: Final = "kv"  # the port where it receives KV blocks
PORT: Final = "port"  # the port that it listens at
READY: Final = "ready"  # the number of its KV blocks
BEAT: Final = "beat"
WHY: Final = "why"  # the reason: it cannot be started


@frozen(kw_only=True)
class EnginePlan:
    """An engine: one of a server's replicas."""

    number: int  # of the replica, from 0
    replicas: int
    fronts: int  # of the server
    args: EngineArgs
    secret: bytes = field(repr=False)  # of the links to these fronts
    on_gpu: bool = False
    timeout: float = 60.0  # seconds without a heartbeat; 0: any number
    blocks: int | None = None  # KV blocks of the engine before, which requests may need

    def settings(self, gpus: str) -> EngineArgs:
        """Have this process use its part of the machine, of which Ray has shown it these
        GPUs; returns the engine's settings.
        """
        device = ReplicaDevice(
            number=self.number,
            gpus=gpus if self.on_gpu else "",
            threads=self.args.parallel.ranks,
            memory=CPU_SHARE / self.replicas,  # if all are on one machine
        )
        args = device.take(self.args)
        if self.blocks is None:
            return args
        return evolve(
            args, num_gpu_blocks_override=self.blocks, kv_cache_memory_bytes=None
        )


@frozen(kw_only=True)
class EngineState:
    """An engine's process on a node, as its actor knows it."""

    node: str  # for messages
    node_id: str = ""  # Ray's
    port: Port | None = None  # where it listens; None: not yet
    kv: Port | None = None  # where it receives KV blocks, if it does
    blocks: int | None = None  # of its KV cache; None: it is not ready
    code: int | None = None  # of its end; negative: by this signal; None: it runs
    why: str = ""  # it ended; empty: its log says so


def anywhere(args: EngineArgs) -> EngineArgs:
    """Returns settings with absolute paths: processes elsewhere have other folders."""
    model, journal = args.model, args.journal
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    if journal is not None:
        journal = Path(journal).resolve()
    return evolve(args, model=model, journal=journal)
