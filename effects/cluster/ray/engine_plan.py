"""The messages between the keeper of engines, the actor of each, and its process."""

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from attrs import evolve, field, frozen

from minfer.effects.cluster.processes.replica_devices import ReplicaDevice
from minfer.effects.net.addresses import Port
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import CPU_SHARE
from minfer.effects.setup.speculation_settings import speculative_config

STOP_SECONDS: Final = 5.0  # in which an engine has to end
KEEPER_SECONDS: Final = 30.0  # without a call of a keeper until an actor ends
CANNOT_START: Final = 2  # exit code, as of all commands, for errors that users can mend
_REPORT_FILE: Final = "report"


@frozen(kw_only=True)
class EnginePlan:
    """What an actor needs to start the engine of a replica."""

    number: int  # of the replica, from 0
    replicas: int
    api_servers: int  # of the server
    args: EngineArgs
    secret: bytes = field(repr=False)  # of the links to these API servers
    on_gpu: bool = False
    timeout: float = 60.0  # seconds without a heartbeat until it is killed; 0: never
    # KV blocks of the engine that it replaces: requests that are resubmitted may need as
    # many. None: as the settings say.
    blocks: int | None = None
    keeper_timeout: float = KEEPER_SECONDS

    def settings(self, gpus: str) -> EngineArgs:
        """Limit this process to its part of the node; returns the engine's settings.
        `gpus` are those that Ray gave the actor, as in CUDA_VISIBLE_DEVICES.
        """
        device = ReplicaDevice(
            number=self.number,
            gpus=gpus if self.on_gpu else "",
            threads=self.args.parallel.ranks,
            memory=CPU_SHARE / self.replicas,  # all may be on one node
        )
        args = device.take(self.args)
        return args if self.blocks is None else args.with_blocks(self.blocks)


@frozen(kw_only=True)
class EngineProcessState:
    """The state of an engine's process on a node, as its actor knows it."""

    node: str  # for messages
    node_id: str = ""  # Ray's, in hex
    actor: str = ""  # of the actor's process: another one after each restart
    port: Port | None = None  # where it listens; None: not yet
    kv: Port | None = None  # where it receives KV blocks, if it does
    blocks: int | None = None  # of its KV cache; None: it is not ready
    code: int | None = None  # exit code; negative: the signal's number; None: it runs
    why: str = ""  # why it ended; empty: see its log


@frozen(kw_only=True)
class EngineReport:
    """What an engine's process reports to its actor, in a file."""

    port: int | None = None  # where it listens; None: not yet
    kv: int | None = None  # the port where it receives KV blocks, if it does
    blocks: int | None = None  # of its KV cache; None: it is not ready
    why: str = ""  # why it cannot be started

    def write(self, folder: Path) -> None:
        """Replace what was reported before."""
        temporary = folder / f"{_REPORT_FILE}.part"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.rename(folder / _REPORT_FILE)  # never there in part


def read_report(folder: Path) -> EngineReport:
    """Returns the latest report in the folder of an engine's process."""
    with suppress(FileNotFoundError):
        data = (folder / _REPORT_FILE).read_bytes()
        return msgspec.json.decode(data, type=EngineReport)
    return EngineReport()


def with_absolute_paths(args: EngineArgs) -> EngineArgs:
    """Returns settings with absolute paths, for processes with other working folders."""
    drafts = speculative_config(args.speculative_config)
    if drafts is not None:
        drafts = evolve(drafts, model=_with_absolute_path(drafts.model))
    return evolve(
        args,
        model=_with_absolute_path(args.model),
        speculative_config=drafts,
        journal=args.journal and Path(args.journal).resolve(),
        kv_disk=args.kv_disk and Path(args.kv_disk).resolve(),
    )


def _with_absolute_path(model: str | None) -> str | None:
    """Returns a model with an absolute path, if it is a folder or file here."""
    if model is None or not Path(model).exists():
        return model
    return str(Path(model).resolve())
