"""The driver: one loop over any executor. It takes events, folds `step`, performs
commands.

All that is nondeterministic enters here, as events of a turn: arrivals, cancels, results,
time. A turn is handed to `record` before its commands are performed, so that a journal
holds everything that anybody was told.

Rows under a grammar are sampled apart, by masks that the host makes while the device
runs. A mask is a function of the tokens so far, so making those of a step begins when the
last token before it is known; the next step, which feeds what these rows draw, is planned
by then, and launched once they have been drawn:

    device   forward 1 ........ draws 1   forward 2 ........ draws 2   forward 3
    host       tokens 0, plan 2, masks 1    tokens 1, plan 3, masks 2

So the device waits for the host only where masks take longer than a forward. With more
steps in flight, a step may feed rows of one whose masks await tokens of another row: it
is held until these are there.
"""

import contextlib
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import compress
from typing import Final, Protocol

from attrs import define, field

from minfer.config import EngineConfig
from minfer.effects.execution.executor import Executor
from minfer.effects.live.drafts import Drafts, NoDrafts
from minfer.effects.live.masks import Masked, MaskMaker, NoMasks
from minfer.effects.live.policy_warnings import PolicyWarnings
from minfer.engine import step
from minfer.messages import (
    Emit,
    Event,
    Execute,
    Executed,
    Failed,
    Finish,
    Submit,
    Tick,
    WakeAt,
)
from minfer.plan import Plan, SampleApart
from minfer.state import EngineState, Transition, Turn, initial

SWITCH: Final = 5e-4  # seconds


@define
class Switching:
    """How many loops of this process have threads take turns sooner; the interval is the
    process's.
    """

    loops: int = 0
    before: float = 0.0  # seconds: what it was without them
    lock: threading.Lock = field(factory=threading.Lock)


_switching: Final = Switching()


class Recorder(Protocol):
    """Who is shown every turn before its commands are performed: a journal."""

    def __call__(self, turn: Turn) -> None:
        """Take a turn down."""
        ...

    def close(self, state: EngineState) -> None:
        """Learn that no turn follows; `state` is the last."""
        ...


@define(eq=False)
class Apart:
    """A step that was launched, whose rows apart wait for their masks."""

    plan: Plan
    masked: "Future[Masked] | None" = None  # None: a token before it is not known yet
    sampled: bool = False
    gens: frozenset[int] = field(init=False)  # whose rows these are

    def __attrs_post_init__(self) -> None:
        self.gens = frozenset(map(self.plan.gens.__getitem__, self.plan.apart))

    def feeds(self, gens: Iterable[int]) -> bool:
        """Whether some of these rows are fed by what is drawn here."""
        return not self.gens.isdisjoint(gens)

    @property
    def is_there(self) -> bool:
        """Whether the masks have been made."""
        return self.masked is not None and self.masked.done()


class Driver:
    """An engine that runs: the pure state, an inbox of events, and an executor.

    `post` may be called from any thread; `turn` from one thread only.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        record: Recorder | None = None,
        masks: MaskMaker | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """`masks` is asked which tokens rows that are sampled apart may draw, once all
        before them are known: the plan that they are in was launched by then, and the
        next one waits for the answer. None: any token. `drafts` says what the host
        drafts.
        """
        self.config = config
        self.executor = executor
        self.clock = clock
        self.record = record
        self.masks = NoMasks() if masks is None else masks
        self.drafts = NoDrafts() if drafts is None else drafts
        self.apart: list[Apart] = []  # in order of their steps
        self.held: deque[Plan] = deque()  # steps that cannot be launched yet, in order
        self.ends: list[Finish] = []  # that who makes masks asks for
        self.state: EngineState = initial(config)
        self.inbox: deque[Event] = deque()
        self.policy_warnings = PolicyWarnings(config.policy)
        self.masks.listen(self.post)
        self.masks.write_to(executor.mask_lines)
        self.turns = 0  # taken so far
        self.taken: tuple[Event, ...] = ()  # the events of the last one
        # When a turn is due even if nothing happens, on the clock.
        self.wake: float | None = None

    @property
    def busy(self) -> bool:
        """Whether requests are being served or events wait."""
        return bool(self.inbox or self.state.inflight or self.state.requests)

    def post(self, event: Event) -> None:
        """Add an event to the next turn."""
        self.inbox.append(event)

    def turn(self, before: Callable[[Transition], None] | None = None) -> Transition:
        """Take one turn; waits for the earliest step in flight, if there is one. `before`
        sees what was decided before it is done.
        """
        result = self._collected()
        waiting = [self.inbox.popleft() for _ in range(len(self.inbox))]
        # Ends before results: what was drawn for these rows does not count.
        ends, self.ends = self.ends, []
        # Pauses come last: whoever may go on, by what came in, may be paused again.
        arrived = [one.request for one in waiting if isinstance(one, Submit)]
        pauses = self.masks.arrived(arrived)
        now = Tick(self.clock())
        proposals = self.drafts.heard(result, self.state)
        events: tuple[Event, ...] = (now, *ends, *result, *proposals, *waiting, *pauses)
        transition = step(self.config, self.state, events)
        if self.record is not None:
            self.record(Turn(self.turns, self.state, events, transition))
        self.turns += 1
        self.state = transition.state
        self.taken = events
        self.wake = None
        self._forget_void()
        self.policy_warnings.see(transition.reasons)
        self.masks.turned(transition)
        self.drafts.turned(transition)
        self._begin_masks()
        self._launch_held()
        if before is not None:
            before(transition)
        for command in transition.commands:
            match command:
                case Execute(plan):
                    self.held.append(plan)
                    self._launch_held()
                case WakeAt(moment):
                    self.wake = moment
                case Emit(finished=finished):  # the rest is the caller's
                    ended = [(one.id, one.sample) for one in finished]
                    self.masks.forget(ended)
        return transition

    def _launch_held(self) -> None:
        """Launch steps in their order, up to one that feeds rows whose masks await
        tokens.
        """
        while self.held:
            gens = self.held[0].gens
            if any(one.masked is None and one.feeds(gens) for one in self.apart):
                return
            self._launch(self.held.popleft())

    def _launch(self, plan: Plan) -> None:
        """Hand a plan over, once all is drawn that its rows feed themselves."""
        for apart in self.apart:
            if apart.is_there or apart.feeds(plan.gens):
                self._sample(apart)
        self._let_go_of_sampled()
        self.executor.launch(plan)
        if plan.apart:
            self.apart.append(Apart(plan))
            self._begin_masks()

    def _begin_masks(self) -> None:
        """Have masks made of the steps whose rows apart have no token in flight before
        it.
        """
        for apart in self.apart:
            if apart.masked is None and not self._awaits_tokens(apart):
                apart.masked = self.masks.begin(apart.plan, self.state)

    def _awaits_tokens(self, apart: Apart) -> bool:
        """Whether a step in flight before it yields tokens for its rows apart."""
        gens = apart.gens
        for plan in self.state.inflight:
            if plan.step >= apart.plan.step:
                return False
            if not gens.isdisjoint(compress(plan.gens, plan.most)):
                return True
        return False

    def _collected(self) -> tuple[Executed | Failed, ...]:
        """The results of the earliest step in flight, if there is one.

        Its own masks are waited for. Those of later steps are handed on once they are
        there: before the next step is launched, if they are in time.
        """
        if not self.state.inflight:
            return ()
        earliest = self.state.inflight[0].step
        for apart in self.apart:
            if apart.plan.step == earliest:
                self._sample(apart)
        result = self.executor.collect()
        for apart in self.apart:
            if apart.is_there:
                self._sample(apart)
        self._let_go_of_sampled()
        return (result,)

    def _sample(self, apart: Apart) -> None:
        """Have the rows drawn that waited for masks, once these are there."""
        if apart.sampled:
            return
        if apart.masked is None:
            raise AssertionError(f"step {apart.plan.step} awaits tokens before its masks")
        apart.sampled = True
        masked = apart.masked.result()
        self.ends += masked.ends
        told = SampleApart(apart.plan.step, masked.masks, masked.written)
        self.executor.sample(told)

    def _let_go_of_sampled(self) -> None:
        self.apart = [one for one in self.apart if not one.sampled]

    def _forget_void(self) -> None:
        """Steps that are in flight no more, as one before them failed, are not done."""
        if self.apart or self.held:
            flying = {plan.step for plan in self.state.inflight}
            self.apart = [one for one in self.apart if one.plan.step in flying]
            self.held = deque(plan for plan in self.held if plan.step in flying)

    def close(self) -> None:
        """Let go of the executor and end the record."""
        self.masks.close()
        self.executor.close()
        if self.record is not None:
            self.record.close(self.state)


@contextlib.contextmanager
def prompt_switches() -> Iterator[None]:
    """Threads that compute in Python let others have the interpreter ten times as soon,
    while the loop runs: by default its step would wait 5 ms for each of them.
    """
    with _switching.lock:
        if not _switching.loops:
            _switching.before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH)
        _switching.loops += 1
    try:
        yield
    finally:
        with _switching.lock:
            _switching.loops -= 1
            if not _switching.loops:
                sys.setswitchinterval(_switching.before)


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Automatic garbage collection off while the loop runs; records cannot form cycles.

    A full collection over a large state stops the loop for tens of milliseconds. What a
    busy loop leaves behind is freed by reference counts; the rest is collected when the
    engine is idle.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
