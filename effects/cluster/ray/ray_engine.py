"""An engine on a cluster, which the keeper handles like a process: it starts it, looks
whether it is ready or has ended, and ends it.

    start   an actor is asked for the engine's state, which starts the engine there
    poll    the actor's answer is taken, and it is asked again
    end     Ray restarts the actor, on any node with room; no engine runs there yet

The actor is detached: it outlives the keeper that created it, and the next one finds it
by its name. If the actor or its node fails, Ray restarts it without being asked; the
engine has ended then, too. An actor without a node does not answer: the engine waits.

A call may be lost with an actor, or wait until the actor has a node. So another one is
made when one returns, fails, or takes long (CALL_SECONDS, RESTART_POLL_SECONDS).
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from attrs import define, evolve, field, frozen
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from minfer.effects.cluster.processes.engine_address import EngineAddress, write_address
from minfer.effects.cluster.ray.engine_actor import EngineActor
from minfer.effects.cluster.ray.engine_plan import (
    CANNOT_START,
    EnginePlan,
    EngineProcessState,
)
from minfer.effects.cluster.ray.ray_cluster import CPU, GPU
from minfer.version import __version__

POLL_SECONDS: Final = 0.1  # from an actor's answer to the next call
CALL_SECONDS: Final = 5.0  # after which a call is given up: it may be lost
# After which another call is made while the actor may be restarting. Ray has a
# call to such an actor fail after one or two seconds, even if the actor is there by then;
# one that is made then is answered at once.
RESTART_POLL_SECONDS: Final = 0.3
LOST_EXIT_CODE: Final = 137  # of an engine that was lost: as if it was killed


@frozen
class EnginePlace:
    """The name of an engine's actor, and the resources that it needs."""

    name: str
    needs: Mapping[str, float]  # of one node, by Ray's name of the resource

    @property
    def is_there(self) -> bool:
        """Whether an earlier keeper created the actor, and it has not ended for good."""
        with suppress(ValueError):
            ray.get_actor(self.name)
            return True
        return False

    def actor(self) -> Any:
        """Returns the actor, which is created if there is none. Does not wait: Ray
        starts a new actor when a node has the resources.
        """
        actor_class = ray.remote(EngineActor).options(
            name=self.name,
            num_cpus=self.needs.get(CPU, 0),
            num_gpus=self.needs.get(GPU, 0),
            max_restarts=-1,
            lifetime="detached",
            get_if_exists=True,
        )
        return actor_class.remote()


@frozen(kw_only=True)
class ActorEngineEnd:
    """How an engine has ended."""

    node: str
    code: int  # exit code; 128 and its number for a signal
    why: str


@frozen(eq=False)
class _Call:
    """A call of an actor."""

    answer: Any  # a Ray object reference
    made: float  # monotonic s


@define(eq=False)
class RayEngine:
    """An engine, and its actor."""

    plan: EnginePlan
    path: Path  # the file with its address is beside this
    place: EnginePlace
    # The latest; None: unknown since it was started.
    state: EngineProcessState | None = None
    actor: Any = field(init=False)
    _ended: str = ""  # the actor's process whose engine has ended
    _calls: list[_Call] = field(factory=list)  # that are pending
    _due: float = 0.0  # monotonic s: when another one is made
    _heard: float = field(factory=time.monotonic)  # when one returned or failed

    def __attrs_post_init__(self) -> None:
        self.actor = self.place.actor()

    @property
    def ready(self) -> bool:
        """Whether it is ready, by its latest state."""
        return self.state is not None and self.state.blocks is not None

    def start(self) -> None:
        """Start it at the next poll, unless it runs."""
        self._due = time.monotonic()

    def poll(self) -> ActorEngineEnd | None:
        """Take the answer of the actor, if there is one, or call it; never waits. Returns
        how the engine has ended, if it has since the last poll.
        """
        now = time.monotonic()
        answer = self._answer(now)
        if answer is not None:
            self._heard, self._due = now, now + POLL_SECONDS
            return self._take_answer(answer)
        if self.state is None and now > self._heard + CALL_SECONDS:
            write_address(self.path, None)  # an earlier keeper's may be out of date
        if now >= self._due:
            reference = self.actor.keep.remote(__version__, self.plan)
            self._calls.append(_Call(reference, now))
            self._due = now + (
                RESTART_POLL_SECONDS if self.state is None else CALL_SECONDS
            )
        return None

    def end(self) -> None:
        """End it, and have Ray restart its actor on any node that has room and is not
        being drained.
        """
        self._ended = "" if self.state is None else self.state.actor
        self._forget()
        with suppress(RayError):
            ray.kill(self.actor, no_restart=False)

    def _answer(self, now: float) -> EngineProcessState | RayError | None:
        """Returns the first answer of the pending calls; None if there is none yet."""
        for call in [*self._calls]:
            try:
                state: EngineProcessState = ray.get(call.answer, timeout=0)
            except GetTimeoutError:
                if now > call.made + CALL_SECONDS:
                    self._calls.remove(call)
                    ray.cancel(call.answer)  # or calls pile up where no node has room
                continue
            except RayTaskError as error:  # e.g. the node has another version of minfer
                error_line = str(error.cause or error).splitlines()[-1]
                state = EngineProcessState(
                    node="its node", code=CANNOT_START, why=error_line
                )
            except RayError as error:
                self._calls.remove(call)
                return error
            self._calls.clear()
            return state
        return None

    def _take_answer(
        self, answer: EngineProcessState | RayError
    ) -> ActorEngineEnd | None:
        if isinstance(answer, RayError):
            if isinstance(answer, ActorDiedError):  # perhaps for good: make another
                self.actor = self.place.actor()
            return self._note_lost(str(answer).splitlines()[0])
        if answer.actor and answer.actor == self._ended:
            return None  # it is about to be restarted
        if self.state is not None and self.state.actor != answer.actor:
            return self._note_lost("it was killed")
        if answer.code is not None:
            return self._note_end(answer, answer.code)
        if answer != self.state:
            self.state = answer
            port, kv, node = answer.port, answer.kv, answer.node
            write_address(self.path, port and EngineAddress(port, kv, node))
            if answer.blocks is not None:
                self.plan = evolve(self.plan, blocks=answer.blocks)
        return None

    def _note_end(self, answer: EngineProcessState, code: int) -> ActorEngineEnd:
        self.state = answer
        if answer.blocks is None:  # it was never ready
            # The next node may not have memory for as many blocks.
            self.plan = evolve(self.plan, blocks=None)
        reason = f"it ended with {code}" if code >= 0 else f"signal {-code}"
        self.end()
        return ActorEngineEnd(
            node=answer.node,
            code=code if code >= 0 else 128 - code,
            why=answer.why or reason,
        )

    def _note_lost(self, reason: str) -> ActorEngineEnd | None:
        """Forget an actor's process that is gone; returns how the engine ended that was
        known to run there.
        """
        state = self.state
        self._forget()
        if state is None:
            return None
        return ActorEngineEnd(
            node=state.node, code=LOST_EXIT_CODE, why=f"it is gone: {reason}"
        )

    def _forget(self) -> None:
        write_address(self.path, None)
        self.state = None
        self._calls.clear()
