"""The driver: one loop over any executor. It takes events, folds `step`, performs
commands.

All that is nondeterministic enters here, as events of a turn: arrivals, cancels, results,
time. A turn is handed to `record` before its commands are performed, so that a journal
holds everything that anybody was told.
"""

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from minfer.config import EngineConfig
from minfer.effects.execution.executor import Executor
from minfer.engine import step
from minfer.messages import Emit, Event, Execute, Tick, WakeAt
from minfer.plan import Mask, Plan, SampleApart
from minfer.state import EngineState, Transition, Turn, initial


class Recorder(Protocol):
    """Who is shown every turn before its commands are performed: a journal."""

    def __call__(self, turn: Turn) -> None:
        """Take a turn down."""
        ...

    def close(self, state: EngineState) -> None:
        """Learn that no turn follows; `state` is the last."""
        ...


def none_needed(_: Plan) -> tuple[Mask, ...]:
    """No masks: every row may draw any token."""
    return ()


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
        masks: Callable[[Plan], tuple[Mask, ...]] = none_needed,
    ) -> None:
        """`masks` is asked, once a plan with rows that are sampled apart was launched,
        which tokens these may draw; it may take its time, as the plan's other rows do not
        wait.
        """
        self.config = config
        self.executor = executor
        self.clock = clock
        self.record = record
        self.masks = masks
        self.state: EngineState = initial(config)
        self.inbox: deque[Event] = deque()
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
        result = (self.executor.collect(),) if self.state.inflight else ()
        waiting = [self.inbox.popleft() for _ in range(len(self.inbox))]
        events: tuple[Event, ...] = (Tick(self.clock()), *result, *waiting)
        transition = step(self.config, self.state, events)
        if self.record is not None:
            self.record(Turn(self.turns, self.state, events, transition))
        self.turns += 1
        self.state = transition.state
        self.taken = events
        self.wake = None
        if before is not None:
            before(transition)
        apart: list[Plan] = []
        for command in transition.commands:
            match command:
                case Execute(plan):
                    self.executor.launch(plan)
                    if plan.apart:
                        apart.append(plan)
                case WakeAt(moment):
                    self.wake = moment
                case Emit():
                    pass  # the caller's: see Transition.commands
        for plan in apart:
            self.executor.sample(SampleApart(plan.step, self.masks(plan)))
        return transition

    def close(self) -> None:
        """Let go of the executor and end the record."""
        self.executor.close()
        if self.record is not None:
            self.record.close(self.state)


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
