"""The Ray actor of a replica: it reserves the replica's resources on a node, and runs the
engine there in a child process that it watches. It does not restart that process: the
keeper (`engine_keeper`) has Ray restart the whole actor. If the keeper was killed, the
engine goes on serving until the next one calls; without a call for KEEPER_SECONDS, the
server is taken to be gone, and the actor ends.
"""

import multiprocessing
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import ray
from attrs import define, field, frozen

from minfer.effects.cluster.ray.engine_plan import (
    CANNOT_START,
    KEEPER_SECONDS,
    STOP_SECONDS,
    EnginePlan,
    EngineProcessState,
    read_report,
)
from minfer.effects.net.child import STOP, Child, spawn_child
from minfer.effects.net.run_folder import run_folder
from minfer.version import __version__

_CHECK_SECONDS: Final = 0.5  # between two checks of a timeout
# Run as a program, so that the actor need not import the engine, which is slow.
_CHILD: Final = "minfer.effects.cluster.ray.engine_child"
_HUNG_MESSAGE: Final = (
    "it has not answered for too long (--engine-timeout), and was killed"
)


class EngineActor:
    """The actor of a replica. Ray calls its methods one after the other."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._keeper_timeout = KEEPER_SECONDS
        self._engine: _Engine | None = None
        self._asked = time.monotonic()
        own_actor = ray.get_runtime_context().current_actor
        end = self._end_without_keeper
        threading.Thread(target=end, args=[own_actor], daemon=True).start()

    def keep(self, version: str, plan: EnginePlan) -> EngineProcessState:
        """Start the engine unless it has been started, and kill it if it hangs; returns
        its state. `version` is that of the server's minfer: if the node has another one,
        no engine is started, and the state says why.
        """
        self._asked = time.monotonic()
        host = ray.util.get_node_ip_address()
        node = _Node(
            name=f"{socket.gethostname()} ({host})",
            id=ray.get_runtime_context().get_node_id(),
            host=host,
        )
        if version != __version__:
            reason = f"it has minfer {__version__}, and the server has {version}"
            return EngineProcessState(
                node=node.name, actor=self._id, code=CANNOT_START, why=reason
            )
        if self._engine is None:
            self._keeper_timeout = plan.keeper_timeout
            self._engine = _Engine.started(plan, host)
        return self._engine.state(node, self._id)

    def stop(self) -> None:
        """Stop the engine; kill it if it has not ended after STOP_SECONDS."""
        if self._engine is not None:
            self._engine.stop()

    def _end_without_keeper(self, own_actor: Any) -> None:
        while time.monotonic() < self._asked + self._keeper_timeout:
            time.sleep(_CHECK_SECONDS)
        self.stop()
        ray.kill(own_actor)


@frozen(kw_only=True)
class _Node:
    """The node of the actor."""

    name: str  # for messages
    id: str  # Ray's, in hex
    host: str  # the address that other nodes reach


@define(eq=False)
class _Engine:
    """The engine's process, and the folder in which it reports."""

    child: Child
    folder: Path
    _hung: bool = False
    _opened: ExitStack = field(factory=ExitStack)  # has the folder

    @classmethod
    def started(cls, plan: EnginePlan, host: str) -> "_Engine":
        """Start the process of an engine, which listens at the node's address `host`."""
        resources = ExitStack()
        folder = resources.enter_context(run_folder())
        receiver, sender = multiprocessing.Pipe(duplex=False)
        with sender:
            with receiver:
                file = receiver.fileno()
                child = spawn_child(
                    _CHILD,
                    host,
                    str(folder),
                    str(file),
                    descriptors=[file],
                    limit=plan.timeout,
                )
            with suppress(OSError):  # it has ended already; its log says why
                sender.send(plan)
        return cls(child, folder, opened=resources)

    def state(self, node: _Node, actor: str) -> EngineProcessState:
        """Returns the state of the engine; kills it if it hangs."""
        code = self.child.poll()  # first: what it reports before its end is read then
        report = read_report(self.folder)
        is_ready = report.blocks is not None
        if code is None and self.child.hangs(time.monotonic(), ready=is_ready):
            self._hung = True
            self.child.kill()
        return EngineProcessState(
            node=node.name,
            node_id=node.id,
            actor=actor,
            port=None if report.port is None else (node.host, report.port),
            kv=None if report.kv is None else (node.host, report.kv),
            blocks=report.blocks,
            code=code,
            why=_HUNG_MESSAGE if self._hung else report.why,
        )

    def stop(self) -> None:
        """Stop the process; kill it if it has not ended after STOP_SECONDS."""
        self.child.signal(STOP)
        self.child.wait(STOP_SECONDS)
        self.child.kill()
        self._opened.close()
