"""The driver: one loop over any executor. It takes events, folds `step`, performs
commands.

All that is nondeterministic enters here, as events of a turn: arrivals, cancels, results,
time. A turn is handed to `record` before its commands are performed, so that a journal
holds everything that was reported to clients.

Rows with a grammar have deferred sampling, by masks that the host makes while the device
runs. A mask is a function of the tokens so far, so making the masks of a step begins when
the last token before it is known; the next step, whose inputs are the tokens of these
rows, is planned by then, and launched once they have been sampled:

    device   forward 1 ........ draws 1   forward 2 ........ draws 2   forward 3
    host       tokens 0, plan 2, masks 1    tokens 1, plan 3, masks 2

So the device waits for the host only where masks take longer than a forward. With more
steps in flight, a step may need tokens of one whose masks await tokens of another row:
its launch is delayed until these are there.
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

from minfer.effects.execution.contract import Executor
from minfer.effects.live.engine.host_drafts import HostDraftSource, NoHostDrafts
from minfer.effects.live.engine.policy_warnings import PolicyWarnings
from minfer.effects.live.masks import MaskMaker, NoMasks, StepMasks
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import (
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
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.state import EngineState, Transition, Turn, initial

SWITCH: Final = 5e-4  # seconds


@define
class Switching:
    """How many loops of this process shortened the interpreter's switch interval, which
    is global to the process.
    """

    loops: int = 0
    before: float = 0.0  # seconds: the interval without them
    lock: threading.Lock = field(factory=threading.Lock)


_switching: Final = Switching()


class Recorder(Protocol):
    """Gets every turn before its commands are performed: a journal."""

    def __call__(self, turn: Turn) -> None:
        """Record a turn."""
        ...

    def close(self, state: EngineState) -> None:
        """End the record; `state` is the last."""
        ...


@define(eq=False)
class Apart:
    """A launched step whose deferred rows wait for their masks."""

    plan: Plan
    masked: "Future[StepMasks] | None" = None  # None: an earlier token is not known yet
    sampled: bool = False
    gens: frozenset[int] = field(init=False)  # owners of these rows

    def __attrs_post_init__(self) -> None:
        self.gens = frozenset(map(self.plan.gens.__getitem__, self.plan.deferred))

    def feeds(self, gens: Iterable[int]) -> bool:
        """Returns whether one of these rows needs a token that this step samples."""
        return not self.gens.isdisjoint(gens)

    @property
    def is_there(self) -> bool:
        """Whether the masks are ready."""
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
        drafts: HostDraftSource | None = None,
    ) -> None:
        """`masks` makes the masks of rows with deferred sampling, once all tokens before
        them are known: their plan was launched by then, and the next one waits for the
        masks. None: any token. `drafts` makes the host's drafts.
        """
        self.config = config
        self.executor = executor
        self.clock = clock
        self.record = record
        self.masks = NoMasks() if masks is None else masks
        self.drafts = NoHostDrafts() if drafts is None else drafts
        self.apart: list[Apart] = []  # in the order of their steps
        self.held: deque[Plan] = deque()  # steps that cannot be launched yet, in order
        self.ends: list[Finish] = []  # ends that the mask maker requests
        self.state: EngineState = initial(config)
        self.inbox: deque[Event] = deque()
        self.policy_warnings = PolicyWarnings(config.policy)
        self.masks.listen(self.post)
        self.masks.use_memory(executor.mask_lines)
        self.turns = 0  # turns taken so far
        self.taken: tuple[Event, ...] = ()  # the events of the last one
        # When a turn is due even without events, on the clock.
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
        gets the transition before its commands are performed.
        """
        result = self._collected()
        waiting = [self.inbox.popleft() for _ in range(len(self.inbox))]
        # Ends before results: tokens that these rows have sampled do not count.
        ends, self.ends = self.ends, []
        # Pauses come last: events that resume a sample may be followed by its next pause.
        arrived = [one.request for one in waiting if isinstance(one, Submit)]
        pauses = self.masks.add_requests(arrived)
        now = Tick(self.clock())
        proposals = self.drafts.read_results(result, self.state)
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
        self.masks.observe(transition)
        self.drafts.observe(transition)
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
                case Emit(finished=finished):  # the caller does the rest
                    ended = [(one.id, one.sample) for one in finished]
                    self.masks.forget(ended)
        return transition

    def _launch_held(self) -> None:
        """Launch steps in their order, up to one that needs tokens of rows whose masks
        are not begun.
        """
        while self.held:
            gens = self.held[0].gens
            if any(one.masked is None and one.feeds(gens) for one in self.apart):
                return
            self._launch(self.held.popleft())

    def _launch(self, plan: Plan) -> None:
        """Launch a plan, once all tokens that its decode rows need are sampled."""
        for apart in self.apart:
            if apart.is_there or apart.feeds(plan.gens):
                self._sample(apart)
        self._let_go_of_sampled()
        self.executor.launch(plan)
        if plan.deferred:
            self.apart.append(Apart(plan))
            self._begin_masks()

    def _begin_masks(self) -> None:
        """Begin the masks of steps without earlier tokens of their deferred rows in
        flight.
        """
        for apart in self.apart:
            if apart.masked is None and not self._awaits_tokens(apart):
                apart.masked = self.masks.begin(apart.plan, self.state)

    def _awaits_tokens(self, apart: Apart) -> bool:
        """Returns whether an earlier step in flight yields tokens for its deferred
        rows.
        """
        gens = apart.gens
        for plan in self.state.inflight:
            if plan.step >= apart.plan.step:
                return False
            if not gens.isdisjoint(compress(plan.gens, plan.most)):
                return True
        return False

    def _collected(self) -> tuple[Executed | Failed, ...]:
        """Returns the results of the earliest step in flight, if there is one.

        Waits for that step's own masks. Masks of later steps are sent when they are
        ready: before the next step is launched, if they are in time.
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
        """Wait for a step's masks, and sample its deferred rows with them."""
        if apart.sampled:
            return
        if apart.masked is None:
            raise AssertionError(f"step {apart.plan.step} awaits tokens before its masks")
        apart.sampled = True
        masked = apart.masked.result()
        self.ends += masked.ends
        told = SampleDeferred(apart.plan.step, masked.masks, masked.written)
        self.executor.sample(told)

    def _let_go_of_sampled(self) -> None:
        self.apart = [one for one in self.apart if not one.sampled]

    def _forget_void(self) -> None:
        """Drop steps that are in flight no more, as an earlier one failed."""
        if self.apart or self.held:
            flying = {plan.step for plan in self.state.inflight}
            self.apart = [one for one in self.apart if one.plan.step in flying]
            self.held = deque(plan for plan in self.held if plan.step in flying)

    def close(self) -> None:
        """Close the executor and end the record."""
        self.masks.close()
        self.executor.close()
        if self.record is not None:
            self.record.close(self.state)


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Have Python threads switch ten times as often while the loop runs: by default each
    of the loop's steps would wait 5 ms for every thread that computes.
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
def paused_collector() -> Iterator[None]:
    """Disable automatic garbage collection while the loop runs; records cannot form
    cycles.

    A full collection over a large state stops the loop for tens of milliseconds.
    Reference counts free the garbage of a busy loop; the rest is collected when the
    engine is idle.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
