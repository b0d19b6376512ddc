"""The process of a server that keeps its engines on a cluster: it has an actor for each,
asks it how the engine is, and tells the fronts where that listens.

    an actor that answers        its engine is started there, if it was not yet
    its engine has ended         Ray restarts the actor, on any node that has room
    it, or its node, is gone     Ray restarts it by itself
    no node has room             it waits; a node that joins gets it
    its node is drained          Ray restarts it elsewhere, once another node has room
    the keeper is killed         the next one finds the actors, whose engines went on

Calls may be lost with an actor, or wait until it has a place: of each actor one is under
way, and another one follows when that fails or takes too long.
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
from attrs import define, evolve, field
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from minfer.effects.live.engine_process import STOP
from minfer.effects.serving.distributed.engine_place import EnginePlace, restart
from minfer.effects.serving.distributed.engine_plan import (
    CANNOT_START,
    LAST,
    EnginePlan,
    EngineState,
    anywhere,
)
from minfer.effects.serving.distributed.ray_cluster import (
    GPU,
    check_nodes,
    connected,
    has_room,
    leaving,
    needs,
    nodes,
)
from minfer.effects.serving.observability.logs import configure_logs
from minfer.effects.serving.processes.engine_address import (
    EngineAddress,
    note_address,
)
from minfer.effects.serving.processes.process_ends import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
)
from minfer.effects.serving.processes.serve_processes import EnginesElsewhere
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError
from minfer.version import __version__

LOOK: Final = 0.1  # seconds between two looks
LATE: Final = 5.0  # seconds after which another call is made; the first may be lost
MOVE: Final = 2.0  # seconds between two looks for nodes that are drained
SAY: Final = 15.0  # seconds in which an actor has begun, if a node has room


def keep_engines(
    engines: EnginesElsewhere, beat: Callable[[], None], ready: Callable[[], None]
) -> int:
    """Keep the engines of a server on a cluster until a `STOP`; returns the exit code.
    `ready` is called once the first of them is ready, and `beat` some times a second.

    Raises ConfigError if the cluster or one of its nodes cannot serve the model, or if
    an engine cannot be started before any was.
    """
    configure_logs("cluster")
    over = threading.Event()
    _obey(over)
    with connected():
        _obey(over)  # Ray has handlers of its own
        args, found = anywhere(engines.args), nodes()
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
        _end(kept)  # else the next keeper finds them
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
    """`again`: an earlier keeper has made the actors, and some engine was ready."""
    served, said = again, False
    begun = looked = time.monotonic()
    if again:
        ready()
    while not over.wait(LOOK):
        beat()
        for one in kept:
            one.look(served=served)
        if not served and any(one.ready for one in kept):
            served = True
            ready()
        if time.monotonic() > looked + MOVE:
            looked = time.monotonic()
            _move_one(kept)
        if not said and time.monotonic() > begun + SAY:
            said = True
            if waiting := [one.name for one in kept if one.state is None]:
                _say(f"{', '.join(waiting)} of {len(kept)} wait for a node with room")


@define(eq=False)
class KeptEngine:
    """An engine on the cluster, and its actor."""

    plan: EnginePlan
    path: Path  # beside which its address is
    place: EnginePlace
    state: EngineState | None = None  # as last said; None: nothing since it was restarted
    failures: int = 0  # in a row, before it was ready
    actor: Any = field(init=False)
    _asked: Any = None  # the call that is under way
    _since: float = 0.0  # when that was made, or the next one may be

    def __attrs_post_init__(self) -> None:
        self.actor = self.place.actor()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"engine {self.plan.number}"

    @property
    def ready(self) -> bool:
        """Whether it is ready, as last said."""
        return self.state is not None and self.state.blocks is not None

    def look(self, *, served: bool) -> None:
        """Take what the actor says, without waiting for it, and ask again. `served`: some
        engine has been ready; else raises ConfigError for one that cannot be started.
        """
        now = time.monotonic()
        if self._asked is None:
            if now >= self._since:
                self._asked = self.actor.keep.remote(__version__, self.plan)
                self._since = now
            return
        try:
            state = ray.get(self._asked, timeout=0)
        except GetTimeoutError:
            if now > self._since + LATE:
                self._asked, self._since = None, now
                if self.state is None:  # what an earlier keeper noted is no longer so
                    note_address(self.path, None)
            return
        except RayTaskError as error:  # as where minfer is another one
            why = str(error.cause or error).splitlines()[-1]
            state = EngineState(node="its node", code=CANNOT_START, why=why)
        except RayError as error:
            self._asked, self._since = None, now + LOOK
            self._note_lost(error)
            if isinstance(error, ActorDiedError):  # it may have ended for good
                self.actor = self.place.actor()
            return
        self._asked, self._since = None, now + LOOK
        self._note(state, served=served)

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
            # Another node may have less memory than the one before.
            self.plan = evolve(self.plan, blocks=None)
        pause = min(FIRST_PAUSE * 2**self.failures, LONGEST_PAUSE)
        _say(f"{self.name} on {state.node}: {how}; it is started again")
        self._restart(pause if self.failures else 0.0)

    def move(self) -> None:
        """Have it started again elsewhere, as its node is about to leave."""
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
        self._since = time.monotonic() + pause
        restart(self.actor)


def _server_name(secret: bytes) -> str:
    """What names of a server's actors begin with, whichever keeper made them. Those of
    other servers, also of an earlier one of this machine, begin otherwise.
    """
    own = hashlib.blake2b(secret, digest_size=4, person=b"ray").hexdigest()
    return f"minfer {socket.gethostname()} {own}"


def _move_one(kept: Sequence[KeptEngine]) -> None:
    """Move an engine from a node that is about to leave, if another one has room."""
    gone = leaving()
    for one in kept:
        on = "" if one.state is None else one.state.node_id
        if on in gone and has_room(one.place.needs, gone):
            one.move()
            return


def _end(kept: Sequence[KeptEngine]) -> None:
    """End the engines, and the actors."""
    for one in kept:
        note_address(one.path, None)
    actors = [one.actor for one in kept]
    with suppress(RayError):
        asked = [one.stop.remote() for one in actors]
        ray.wait(asked, num_returns=len(asked), timeout=LAST)
    for one in actors:
        with suppress(RayError):
            ray.kill(one)


def _obey(over: threading.Event) -> None:
    """Have `STOP`, and no other signal, end this process."""
    signal.signal(STOP, lambda *_: over.set())
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)


def _say(what: str) -> None:
    print(f"minfer: {what}", file=sys.stderr, flush=True)
