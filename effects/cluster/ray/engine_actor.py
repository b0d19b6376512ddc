"""The Ray actor of a replica: it reserves the replica's resources on a node, and runs the
engine there in a child process that it watches. It does not restart that process: the
keeper (`engine_keeper`) has Ray restart the whole actor. If the keeper was killed, the
engine goes on serving until the next one calls; without a call for KEEPER_TIMEOUT, the
server is taken to be gone, and the actor ends.
"""

import multiprocessing
import os
import secrets
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

from minfer.effects.cluster.ray import engine_plan
from minfer.effects.cluster.ray.engine_plan import (
    CANNOT_START,
    KEEPER_TIMEOUT,
    STOP_TIMEOUT,
    EnginePlan,
    EngineState,
)
from minfer.effects.net.heartbeat import Heartbeat, Watch
from minfer.effects.net.secret_variables import environment_without_secrets
from minfer.version import __version__

_LOOK: Final = 0.5  # seconds between two checks of a timeout
_CHUNK: Final = 2**16  # bytes, at most, of one read
# Run as a program, so that the actor need not import the engine, which is slow.
_CHILD: Final = "minfer.effects.cluster.ray.engine_child"
_HUNG: Final = "it has not answered for too long (--engine-timeout), and was killed"


class EngineActor:
    """The actor of a replica. Ray calls its methods one after the other."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._keeper_timeout = KEEPER_TIMEOUT
        self._engine: _WatchedEngine | None = None
        self._asked = time.monotonic()
        own = ray.get_runtime_context().current_actor
        end = self._end_without_keeper
        threading.Thread(target=end, args=[own], daemon=True).start()

    def keep(self, version: str, plan: EnginePlan) -> EngineState:
        """Start the engine unless it has been started; returns its state. `version` is
        that of the server's minfer: if the node has another one, no engine is started,
        and the state says why.
        """
        self._asked = time.monotonic()
        if self._engine is None:
            host = ray.util.get_node_ip_address()
            node_id = ray.get_runtime_context().get_node_id()
            node = f"{socket.gethostname()} ({host})"
            if version != __version__:
                why = f"it has minfer {__version__}, and the server has {version}"
                return EngineState(node=node, actor=self._id, code=CANNOT_START, why=why)
            state = EngineState(node=node, node_id=node_id, actor=self._id)
            self._keeper_timeout = plan.keeper_timeout
            self._engine = _WatchedEngine.started(plan, state, host)
        return self._engine.state

    def stop(self) -> None:
        """Stop the engine; kill it if it has not ended after STOP_TIMEOUT."""
        if self._engine is not None:
            self._engine.stop()

    def _end_without_keeper(self, own: Any) -> None:
        while time.monotonic() < self._asked + self._keeper_timeout:
            time.sleep(_LOOK)
        self.stop()
        ray.kill(own)


@define(eq=False)
class _WatchedEngine:
    """The engine's process, and a thread that reads what it reports until it ends."""

    host: str
    child: "subprocess.Popen[bytes]"
    plans: Connection  # to the process, which ends when this is closed
    reports: IO[bytes]  # its standard output
    heartbeat: Heartbeat
    watch: Watch
    state: EngineState
    _kept: bytes = b""

    @classmethod
    def started(cls, plan: EnginePlan, state: EngineState, host: str) -> "_WatchedEngine":
        """Start the process of an engine, which listens at the node's address `host`."""
        held, plans = multiprocessing.Pipe(duplex=False)
        # The child dies with the thread that starts it (`begin_as_child`). Calls of an
        # actor run in its process's main thread, which lives as long as the actor.
        child = subprocess.Popen(
            [sys.executable, "-m", _CHILD, host, str(held.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[held.fileno()],
            env={
                **environment_without_secrets(),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        held.close()
        with suppress(OSError):  # it has ended already; its log says why
            plans.send(plan)
        reports, beats = cast("IO[bytes]", child.stdout), Heartbeat()
        watch = Watch(beats, plan.timeout, child.pid)
        watched = cls(host, child, plans, reports, beats, watch, state)
        threading.Thread(target=watched.follow, name="minfer-watch", daemon=True).start()
        return watched

    def follow(self) -> None:
        """Follow the process's reports until it ends; kill it if it hangs."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK):
                    data = os.read(self.reports.fileno(), _CHUNK)
                    if not data:
                        break  # it has ended
                    self._read(data)
                ready = self.state.blocks is not None
                if self.watch.hangs(time.monotonic(), ready=ready):
                    self.state = evolve(self.state, why=_HUNG)
                    self.child.kill()
                    break
        self.state = evolve(self.state, code=self.child.wait())

    def stop(self) -> None:
        """Stop the process; kill it if it has not ended after STOP_TIMEOUT."""
        with suppress(OSError):
            self.plans.close()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(STOP_TIMEOUT)
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
