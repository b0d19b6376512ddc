"""The process of a server that keeps its engines running on a cluster (the keeper). What
happens when one of them ends is decided by the table of processes, as for engines of one
machine (`process_ends`); here it is executed for engines on a cluster (`ray_engine`).

    no node has room             the engine waits; a node that joins may take it
    its node is drained          it is restarted elsewhere, once another node has room
    the keeper is killed         the next one finds the actors, and engines keep serving

Other than on one machine, the server is ready once one engine is.
"""

import hashlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import ray
from attrs import define, evolve, field, frozen
from ray.exceptions import RayError

from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.cluster.processes.engine_address import write_address
from minfer.effects.cluster.processes.process_ends import (
    Action,
    Processes,
    Start,
    engine_names,
)
from minfer.effects.cluster.ray.engine_plan import (
    STOP_SECONDS,
    EnginePlan,
    with_absolute_paths,
)
from minfer.effects.cluster.ray.ray_cluster import (
    GPU,
    alive_nodes,
    check_nodes,
    connected,
    draining_nodes,
    has_room,
    replica_resources,
    warn_of_open_ports,
)
from minfer.effects.cluster.ray.ray_engine import ActorEngineEnd, EnginePlace, RayEngine
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.child import STOP
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError

POLL_SECONDS: Final = 0.1  # between two polls of the engines
DRAIN_POLL_SECONDS: Final = 2.0  # between two searches for nodes that are drained
# After which engines that no node has room for are named on standard error.
ROOM_WARNING_SECONDS: Final = 15.0


@frozen(kw_only=True)
class RayEngines:
    """The engines of a server, on a cluster."""

    args: EngineArgs
    deployment: Deployment
    api_servers: int
    timeout: float  # seconds without a heartbeat until an engine is killed; 0: never

    def keep(
        self,
        paths: Sequence[Path],
        beat: Callable[[], None],
        ready: Callable[[], None],
    ) -> int:
        """Keep the engines until a `STOP`; returns the exit code. Their addresses are
        written beside `paths`, one for each; `ready` is called when the first of them is
        ready, and `beat` every POLL_SECONDS.

        Raises ConfigError if the cluster or one of its nodes cannot serve the model, or
        if an engine cannot be started, by the table of processes.
        """
        configure_logs("cluster")
        stop_event = threading.Event()
        _handle_signals(stop_event)
        with connected():
            _handle_signals(stop_event)  # connecting has set Ray's handlers
            args, cluster_nodes = with_absolute_paths(self.args), alive_nodes()
            warn_of_open_ports(cluster_nodes)
            resources = replica_resources(args, cluster_nodes)
            plans = self._plans(args, paths, on_gpu=GPU in resources)
            server = _server_name(self.deployment.secret)
            places = [EnginePlace(f"{server} {plan.number}", resources) for plan in plans]
            is_resumed = any(place.is_there for place in places)
            if not is_resumed:
                check_nodes(args, cluster_nodes)
            names = engine_names(len(plans))
            engines = [*map(RayEngine, plans, paths, places)]
            keeper = Keeper(dict(zip(names, engines, strict=True)), ready)
            try:
                keeper.keep(stop_event, beat, is_resumed=is_resumed)
            except ConfigError:
                _end(engines)
                raise
            _end(engines)  # not after other errors: then the next keeper finds the actors
        return 0

    def _plans(
        self, args: EngineArgs, paths: Sequence[Path], *, on_gpu: bool
    ) -> list[EnginePlan]:
        return [
            EnginePlan(
                number=number,
                replicas=len(paths),
                api_servers=self.api_servers,
                args=evolve(args, kv_peers=peers),
                secret=self.deployment.secret,
                on_gpu=on_gpu,
                timeout=self.timeout,
            )
            for number, peers in enumerate(self.deployment.peer_plans(paths, 1))
        ]


@define(eq=False)
class Keeper:
    """Executes the decisions of `Processes` for engines on a cluster."""

    engines: Mapping[str, RayEngine]  # by the names in the table
    ready: Callable[[], None]  # is called when the first engine is ready
    table: Processes = field(init=False)
    _due: dict[str, float] = field(factory=dict)  # monotonic s: when one is started

    def __attrs_post_init__(self) -> None:
        self.table = Processes(api_servers=0, replicas=len(self.engines))

    def keep(
        self, stop_event: threading.Event, beat: Callable[[], None], *, is_resumed: bool
    ) -> None:
        """Keep the engines until `stop_event` is set. `is_resumed`: an earlier keeper
        created the actors, so that some engine was ready.
        """
        start = last_drain_poll = time.monotonic()
        warned = False
        self._execute(self.table.begin())
        if is_resumed:
            self._note_served()
        while not stop_event.wait(POLL_SECONDS):
            beat()
            self.poll(now := time.monotonic())
            if now > last_drain_poll + DRAIN_POLL_SECONDS:
                last_drain_poll = now
                self._move_one()
            if not warned and now > start + ROOM_WARNING_SECONDS:
                warned = True
                self._warn_of_room()

    def poll(self, now: float) -> None:
        """Start the engines that are due, and look at those that were started."""
        for name, engine in self.engines.items():
            if name in self._due and now >= self._due[name]:
                del self._due[name]
                engine.start()
                self.table.note_started(name)
            if name not in self.table.alive:
                continue
            end = engine.poll()
            if engine.ready and name not in self.table.ready:
                self.table.note_ready(name)
                _print(f"{name} is ready on {engine.state and engine.state.node}")
                if not self.table.served:
                    self._note_served()
            if end is not None:
                self._note_ended(name, end)

    def _note_served(self) -> None:
        self.table.served = True  # here one engine is enough
        self.ready()

    def _note_ended(self, name: str, end: ActorEngineEnd) -> None:
        actions = self.table.note_ended(name, end.code)
        if self.table.phase == "stopping":
            raise ConfigError(f"{name} cannot be started on {end.node}: {end.why}")
        _print(f"{name} on {end.node}: {end.why}; it is started again")
        self._execute(actions)

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._due[action.name] = time.monotonic() + action.pause

    def _move_one(self) -> None:
        """Move an engine off a node that is being drained, if another node has room."""
        leaving = draining_nodes()
        for name in sorted(self.table.ready):
            engine = self.engines[name]
            state = engine.state
            if state is None or state.node_id not in leaving:
                continue
            if has_room(engine.place.needs, leaving):
                engine.end()
                reason = "it is being drained"
                self._note_ended(
                    name, ActorEngineEnd(node=state.node, code=0, why=reason)
                )
                return

    def _warn_of_room(self) -> None:
        engines = self.engines.items()
        if waiting := [name for name, engine in engines if engine.state is None]:
            _print(f"{', '.join(waiting)} of {len(engines)} wait for a node with room")


def _server_name(secret: bytes) -> str:
    """Returns the prefix of the names of a server's actors: the same for each of its
    keepers, but not for another server, as `secret` differs.
    """
    digest = hashlib.blake2b(secret, digest_size=4, person=b"ray").hexdigest()
    return f"minfer {socket.gethostname()} {digest}"


def _end(engines: Sequence[RayEngine]) -> None:
    """Stop the engines, and end their actors."""
    for engine in engines:
        write_address(engine.path, None)
    with suppress(RayError):
        asked = [engine.actor.stop.remote() for engine in engines]
        ray.wait(asked, num_returns=len(asked), timeout=STOP_SECONDS)
    for engine in engines:
        with suppress(RayError):
            ray.kill(engine.actor)


def _handle_signals(stop_event: threading.Event) -> None:
    """Set `stop_event` at a `STOP`; ignore SIGTERM and SIGINT, which the supervisor
    handles.
    """
    signal.signal(STOP, lambda *_: stop_event.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def _print(text: str) -> None:
    print(f"minfer: {text}", file=sys.stderr, flush=True)
