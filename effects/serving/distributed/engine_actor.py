"""An actor of Ray's: it has a replica's place on a node, and runs its engine there, in a
process of its own that it watches. It does not start that again: its keeper has Ray
restart the actor. While the keeper is away, as when it was killed, the engine serves on;
if none comes, the server is gone, and the actor ends.
"""

import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any, Final, cast

import ray
from attrs import define, evolve

from minfer.effects.serving.distributed import engine_plan
from minfer.effects.serving.distributed.engine_plan import (
    CANNOT_START,
    LAST,
    EnginePlan,
    EngineState,
)
from minfer.effects.serving.processes.heartbeat import Heartbeat
from minfer.version import __version__

ALONE: Final = 30.0  # seconds without a keeper after which an actor ends
_LOOK: Final = 0.5  # seconds between two looks at the clock
_CHUNK: Final = 2**16  # bytes
# A program: what it imports takes long, and is not needed here.
_CHILD: Final = "minfer.effects.serving.distributed.engine_child"
_HUNG: Final = "it has not answered for too long (--engine-timeout), and was killed"


class EngineActor:
    """The place of a replica. Ray calls its methods one after the other."""

    def __init__(self) -> None:
        self._engine: _WatchedEngine | None = None
        self._asked = time.monotonic()
        own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_alone, args=[own], daemon=True).start()

    def keep(self, version: str, plan: EnginePlan) -> EngineState:
        """Start the engine if it was not yet; returns its state. `version` is the
        server's.
        """
        self._asked = time.monotonic()
        if self._engine is None:
            host = ray.util.get_node_ip_address()
            node_id = ray.get_runtime_context().get_node_id()
            node = f"{socket.gethostname()} ({host})"
            if version != __version__:
                why = f"it has minfer {__version__}, and the server has {version}"
                return EngineState(node=node, code=CANNOT_START, why=why)
            state = EngineState(node=node, node_id=node_id)
            self._engine = _WatchedEngine.started(plan, state, host)
        return self._engine.state

    def stop(self) -> None:
        """Have the engine end, and wait for that."""
        if self._engine is not None:
            self._engine.stop()

    def _end_alone(self, own: Any) -> None:
        while time.monotonic() < self._asked + ALONE:
            time.sleep(_LOOK)
        self.stop()
        ray.kill(own)


@define(eq=False)
class _WatchedEngine:
    """The engine's process, and a thread that reads what it reports until it ends."""

    host: str
    child: "subprocess.Popen[bytes]"
    plans: Connection  # to it, whose end ends it
    reports: IO[bytes]  # its standard output
    heartbeat: Heartbeat
    state: EngineState
    _kept: bytes = b""

    @classmethod
    def started(cls, plan: EnginePlan, state: EngineState, host: str) -> "_WatchedEngine":
        """Start the process of an engine at this address of the node."""
        held, plans = multiprocessing.Pipe(duplex=False)
        # It dies with the thread that starts it: Ray's main one, that of all calls.
        child = subprocess.Popen(
            [sys.executable, "-m", _CHILD, host, str(held.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[held.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        held.close()
        with suppress(OSError):  # it has ended, as its log says
            plans.send(plan)
        reports, beats = cast("IO[bytes]", child.stdout), Heartbeat(plan.timeout)
        watched = cls(host, child, plans, reports, beats, state)
        threading.Thread(target=watched.watch, name="minfer-watch", daemon=True).start()
        return watched

    def watch(self) -> None:
        """Note what the process reports, and its end; kill it if it hangs."""
        self.heartbeat.begin(self.child.pid)
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
        self.state = evolve(self.state, code=self.child.wait())

    def stop(self) -> None:
        """Have the process end, and wait for that."""
        with suppress(OSError):
            self.plans.close()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(LAST)
        self.child.kill()

    def _read(self, data: bytes) -> None:
        *lines, self._kept = (self._kept + data).split(b"\n")
        for line in lines:
            self.heartbeat.beat()
            kind, _, text = line.decode("utf-8", "replace").partition(" ")
            match kind:
                case engine_plan.KV:
                    self.state = evolve(self.state, kv=(self.host, int(text)))
                case engine_plan.PORT:
                    self.state = evolve(self.state, port=(self.host, int(text)))
                case engine_plan.READY:
                    self.state = evolve(self.state, blocks=int(text))
                case engine_plan.WHY:
                    self.state = evolve(self.state, why=text)
