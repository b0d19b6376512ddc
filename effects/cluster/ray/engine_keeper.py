"""The process of a server that keeps its engines running on a cluster (the keeper). It
creates an actor for each engine, asks it for the engine's state again and again, and
tells the fronts the engine's address.

    the actor answers            it has started its engine, if that was not running
    its engine has ended         the keeper has Ray restart the actor, on any node
    it, or its node, is gone     Ray restarts the actor without being asked
    no node has room             the actor waits; a node that joins may take it
    its node is drained          it is restarted elsewhere, once another node has room
    the keeper is killed         the next one finds the actors, and engines keep serving

A call may be lost with an actor, or wait until the actor has a node. So another one is
made when one returns, fails, or takes long (CALL_TIMEOUT, RESTART_POLL).
"""

import hashlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from attrs import define, evolve, field, frozen
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from minfer.effects.cluster.processes.engine_address import (
    EngineAddress,
    note_address,
)
from minfer.effects.cluster.processes.engines_elsewhere import EnginesElsewhere
from minfer.effects.cluster.processes.process_ends import restart_pause
from minfer.effects.cluster.ray.engine_place import EnginePlace, restart
from minfer.effects.cluster.ray.engine_plan import (
    CANNOT_START,
    STOP_TIMEOUT,
    EnginePlan,
    EngineState,
    with_absolute_paths,
)
from minfer.effects.cluster.ray.ray_cluster import (
    GPU,
    check_nodes,
    connected,
    draining_nodes,
    has_room,
    needs,
    nodes,
    warn_of_open_ports,
)
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.child import STOP
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError
from minfer.version import __version__

POLL: Final = 0.1  # seconds between two looks at the actors' answers
CALL_TIMEOUT: Final = 5.0  # seconds after which a call is given up: it may be lost
# Seconds after which another call is made while the actor may be restarting. Ray has a
# call to such an actor fail after one or two seconds, even if the actor is there by then;
# one that is made then is answered at once.
RESTART_POLL: Final = 0.3
DRAIN_POLL: Final = 2.0  # seconds between two looks for nodes that are drained
# Seconds after which engines that no node has room for are named on standard error.
ROOM_WARNING: Final = 15.0


def keep_engines(
    engines: EnginesElsewhere, beat: Callable[[], None], ready: Callable[[], None]
) -> int:
    """Keep the engines of a server on a cluster until a `STOP`; returns the exit code.
    `ready` is called when the first of them is ready, and `beat` every POLL seconds.

    Raises ConfigError if the cluster or one of its nodes cannot serve the model, or if
    an engine cannot be started while none has been ready yet.
    """
    configure_logs("cluster")
    over = threading.Event()
    _handle_signals(over)
    with connected():
        _handle_signals(over)  # connecting has set Ray's handlers
        args, found = with_absolute_paths(engines.args), nodes()
        warn_of_open_ports(found)
        needed = needs(args, found)
        plans = _plans(engines, args, on_gpu=GPU in needed)
        server = _server_name(engines.deployment.secret)
        places = [EnginePlace(f"{server} {plan.number}", needed) for plan in plans]
        again = any(place.is_there for place in places)
        if not again:
            check_nodes(args, found)
        kept = [
            KeptEngine(plan, path, place)
            for plan, path, place in zip(plans, engines.paths, places, strict=True)
        ]
        try:
            _keep(kept, over, beat, ready, again=again)
        except ConfigError:
            _end(kept)
            raise
        _end(kept)  # not after other errors: then the next keeper finds the actors
    return 0


def _plans(
    engines: EnginesElsewhere, args: EngineArgs, *, on_gpu: bool
) -> list[EnginePlan]:
    deployment = engines.deployment
    return [
        EnginePlan(
            number=number,
            replicas=len(engines.paths),
            fronts=engines.fronts,
            args=evolve(args, kv_peers=peers),
            secret=deployment.secret,
            on_gpu=on_gpu,
            timeout=engines.timeout,
        )
        for number, peers in enumerate(deployment.peer_plans(engines.paths, 1))
    ]


def _keep(
    kept: "Sequence[KeptEngine]",
    over: threading.Event,
    beat: Callable[[], None],
    ready: Callable[[], None],
    *,
    again: bool,
) -> None:
    """`again`: an earlier keeper created the actors, so that some engine was ready."""
    served, said = again, False
    begun = looked = time.monotonic()
    if again:
        ready()
    while not over.wait(POLL):
        beat()
        for one in kept:
            one.look(served=served)
        if not served and any(one.ready for one in kept):
            served = True
            ready()
        if time.monotonic() > looked + DRAIN_POLL:
            looked = time.monotonic()
            _move_one(kept)
        if not said and time.monotonic() > begun + ROOM_WARNING:
            said = True
            if waiting := [one.name for one in kept if one.state is None]:
                _say(f"{', '.join(waiting)} of {len(kept)} wait for a node with room")


@frozen(eq=False)
class _Call:
    """A call of an actor."""

    answer: Any  # a Ray object reference
    made: float  # monotonic s


@define(eq=False)
class KeptEngine:
    """An engine on the cluster, and its actor."""

    plan: EnginePlan
    path: Path  # the file with its address is beside this
    place: EnginePlace
    state: EngineState | None = None  # the latest; None: unknown since it was restarted
    failures: int = 0  # starts in a row that ended before it was ready
    actor: Any = field(init=False)
    _calls: list["_Call"] = field(factory=list)  # that are pending
    _due: float = 0.0  # monotonic s: when another one is made
    _heard: float = field(factory=time.monotonic)  # when one returned or failed

    def __attrs_post_init__(self) -> None:
        self.actor = self.place.actor()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"engine {self.plan.number}"

    @property
    def ready(self) -> bool:
        """Whether it is ready, by its latest state."""
        return self.state is not None and self.state.blocks is not None

    def look(self, *, served: bool) -> None:
        """Take the answer of the actor, if there is one, or call it; never waits. Raises
        ConfigError if the engine cannot be started, and none has been ready (`served`).
        """
        now = time.monotonic()
        for call in [*self._calls]:
            try:
                state = ray.get(call.answer, timeout=0)
            except GetTimeoutError:
                if now > call.made + CALL_TIMEOUT:
                    self._calls.remove(call)
                    ray.cancel(call.answer)  # or calls pile up where no node has room
                continue
            except RayTaskError as error:  # e.g. the node has another version of minfer
                why = str(error.cause or error).splitlines()[-1]
                state = EngineState(node="its node", code=CANNOT_START, why=why)
            except RayError as error:
                self._calls.remove(call)
                self._heard, self._due = now, now + POLL
                self._note_lost(error)
                if isinstance(error, ActorDiedError):  # perhaps for good: make another
                    self._calls.clear()
                    self.actor = self.place.actor()
                return
            self._calls.clear()
            self._heard, self._due = now, now + POLL
            self._note(state, served=served)
            return
        if self.state is None and now > self._heard + CALL_TIMEOUT:
            note_address(self.path, None)  # an earlier keeper's may be out of date
        if now >= self._due:
            answer = self.actor.keep.remote(__version__, self.plan)
            self._calls.append(_Call(answer, now))
            self._due = now + (RESTART_POLL if self.state is None else CALL_TIMEOUT)

    def _note(self, state: EngineState, *, served: bool) -> None:
        if state == self.state:
            return
        was_ready, self.state = self.ready, state
        if state.code is None:
            port = state.port
            note_address(self.path, port and EngineAddress(port, state.kv, state.node))
            if state.blocks is not None and not was_ready:
                self.failures = 0
                self.plan = evolve(self.plan, blocks=state.blocks)
                _say(f"{self.name} is ready on {state.node}")
            return
        how = state.why or (
            f"it ended with {state.code}" if state.code >= 0 else f"signal {-state.code}"
        )
        if state.blocks is None:  # it was never ready
            if not served:
                raise ConfigError(f"{self.name} cannot be started on {state.node}: {how}")
            self.failures += 1
            # The next node may not have memory for as many blocks.
            self.plan = evolve(self.plan, blocks=None)
        _say(f"{self.name} on {state.node}: {how}; it is started again")
        self._restart(restart_pause(self.failures) if self.failures else 0.0)

    def move(self) -> None:
        """Have the engine restarted on another node: its own is being drained."""
        if self.state is not None:
            _say(f"{self.state.node} is drained; {self.name} is started again elsewhere")
        self._restart(0.0)

    def _note_lost(self, error: RayError) -> None:
        note_address(self.path, None)
        if self.state is not None and self.state.code is None:
            why = str(error).splitlines()[0]
            _say(f"{self.name} on {self.state.node} is gone, Ray restarts it: {why}")
        self.state = None

    def _restart(self, pause: float) -> None:
        note_address(self.path, None)
        self.state = None
        self._calls.clear()
        self._due = time.monotonic() + pause
        restart(self.actor)


def _server_name(secret: bytes) -> str:
    """The prefix of the names of a server's actors: the same for each of its keepers, but
    not for another server, as `secret` differs.
    """
    own = hashlib.blake2b(secret, digest_size=4, person=b"ray").hexdigest()
    return f"minfer {socket.gethostname()} {own}"


def _move_one(kept: Sequence[KeptEngine]) -> None:
    """Move an engine off a node that is being drained, if another node has room."""
    gone = draining_nodes()
    for one in kept:
        on = "" if one.state is None else one.state.node_id
        if on in gone and has_room(one.place.needs, gone):
            one.move()
            return


def _end(kept: Sequence[KeptEngine]) -> None:
    """Stop the engines, and end their actors."""
    for one in kept:
        note_address(one.path, None)
    actors = [one.actor for one in kept]
    with suppress(RayError):
        asked = [one.stop.remote() for one in actors]
        ray.wait(asked, num_returns=len(asked), timeout=STOP_TIMEOUT)
    for one in actors:
        with suppress(RayError):
            ray.kill(one)


def _handle_signals(over: threading.Event) -> None:
    """Set `over` at a `STOP`; ignore SIGTERM and SIGINT, which the supervisor handles."""
    signal.signal(STOP, lambda *_: over.set())
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)


def _say(what: str) -> None:
    print(f"minfer: {what}", file=sys.stderr, flush=True)
