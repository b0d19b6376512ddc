"""An actor of Ray's: it has a replica's place on a node, and runs its engine there, in a
process of its own that it watches. It does not start that again: its keeper has Ray
restart the actor.
"""

import multiprocessing
import os
import selectors
import socket
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from attrs import define, evolve

from minfer.effects.live.engine_process import STOP
from minfer.effects.serving.distributed import engine_child
from minfer.effects.serving.distributed.engine_plan import (
    CANNOT_START,
    EnginePlan,
    EngineState,
)
from minfer.effects.serving.processes.heartbeat import Heartbeat
from minfer.version import __version__

LAST: Final = 5.0  # seconds that an engine has to end in
_LOOK: Final = 0.5  # seconds between two looks at the clock
_CHUNK: Final = 2**16  # bytes
_HUNG: Final = "it has not answered for too long (--engine-timeout), and was killed"


class EngineActor:
    """The place of a replica. Ray calls its methods one after the other."""

    def __init__(self) -> None:
        self._engine: _WatchedEngine | None = None

    def keep(self, version: str, plan: EnginePlan) -> EngineState:
        """Start the engine if it was not yet; returns its state. `version` is the
        server's.
        """
        import ray

        if self._engine is None:
            host = ray.util.get_node_ip_address()
            node = f"{socket.gethostname()} ({host})"
            if version != __version__:
                why = f"it has minfer {__version__}, and the server has {version}"
                return EngineState(node=node, code=CANNOT_START, why=why)
            self._engine = _WatchedEngine.started(plan, node, host)
        return self._engine.state

    def stop(self) -> None:
        """Have the engine end, and wait for that."""
        if self._engine is not None:
            self._engine.stop()


@define(eq=False)
class _WatchedEngine:
    """The engine's process, and a thread that reads what it reports until it ends."""

    host: str
    child: BaseProcess
    reports: Connection
    lifeline: Connection  # which ends the process when it is closed
    heartbeat: Heartbeat
    state: EngineState
    _kept: bytes = b""

    @classmethod
    def started(cls, plan: EnginePlan, node: str, host: str) -> "_WatchedEngine":
        """Start the process of an engine at this address of the node."""
        fresh = multiprocessing.get_context("spawn")
        (reports, reporter), (held, lifeline) = fresh.Pipe(False), fresh.Pipe(False)
        child = fresh.Process(
            target=engine_child.run_child, args=(plan, host, reporter, held)
        )
        # It dies with the thread that starts it: Ray's main one, that of all calls.
        child.start()
        for one in (reporter, held):
            one.close()
        beats, state = Heartbeat(plan.timeout), EngineState(node=node)
        watched = cls(host, child, reports, lifeline, beats, state)
        threading.Thread(target=watched.watch, name="minfer-watch", daemon=True).start()
        return watched

    def watch(self) -> None:
        """Note what the process reports, and its end; kill it if it hangs."""
        self.heartbeat.begin(self.child.pid or 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK):
                    data = os.read(self.reports.fileno(), _CHUNK)
                    if not data:
                        break  # it has ended
                    self._read(data)
                ready = self.state.blocks is not None
                if self.heartbeat.hangs(time.monotonic(), ready=ready):
                    self.state = evolve(self.state, why=_HUNG)
                    self.child.kill()
                    break
        self.child.join()
        self.state = evolve(self.state, code=self.child.exitcode)

    def stop(self) -> None:
        """Have the process end, and wait for that."""
        if self.child.is_alive() and self.child.pid is not None:
            os.kill(self.child.pid, STOP)
            self.child.join(LAST)
            self.child.kill()

    def _read(self, data: bytes) -> None:
        *lines, self._kept = (self._kept + data).split(b"\n")
        for line in lines:
            self.heartbeat.beat()
            kind, _, text = line.decode("utf-8", "replace").partition(" ")
            match kind:
                case engine_child.PORT:
                    self.state = evolve(self.state, port=(self.host, int(text)))
                case engine_child.READY:
                    self.state = evolve(self.state, blocks=int(text))
                case engine_child.WHY:
                    self.state = evolve(self.state, why=text)
