"""The core on a virtual clock: what replays of traces and timings of turns share."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from attrs import Factory, define, field

from minfer.config import EngineConfig
from minfer.effects.executor import Executor
from minfer.engine import step
from minfer.messages import Admitted, Emit, Event, Execute, Finished, Submit, Tick, WakeAt
from minfer.plan import Plan
from minfer.request import Request
from minfer.state import EngineState, Transition, initial

Arrivals = list[tuple[float, Request]]  # seconds after the start, in their order


@define
class Served:
    """What became of one request; times in seconds."""

    request: Request
    arrived: float
    started: float = math.inf
    turn: float = math.inf  # in which it was admitted
    first: float = math.inf  # token
    last: float = math.inf

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.request.max_tokens - 1)


@define
class Virtual:
    """An engine whose steps take `cost` seconds each, one after the other. Time is virtual."""

    config: EngineConfig
    executor: Executor
    cost: Callable[[Plan], float]
    coming: deque[tuple[float, Request]] = field(factory=deque)
    successor: Callable[[], Request] | None = None  # of who ends; enters the next turn
    state: EngineState = Factory(lambda self: initial(self.config), takes_self=True)
    ends: deque[float] = field(factory=deque)  # of steps in flight
    now: float = 0.0
    wake: float = math.inf
    busy: float = 0.0  # seconds in which steps ran
    turns: int = 0
    most_running: int = 0
    served: dict[str, Served] = field(factory=dict)
    ended: list[Finished] = field(factory=list)
    reasons: Counter[type] = field(factory=Counter)

    def run(self) -> list[Served]:
        """Serve all that come; returns what became of each, in their order."""
        while self.coming or self.state.requests:
            self.turn()
        return [*self.served.values()]

    def turn(self) -> float:
        """Take a turn when next something happens; returns the real seconds of the core."""
        due = self.ends[0] if self.ends else math.inf
        self.now = max(self.now, min(due, self.wake, self.coming[0][0] if self.coming else due))
        events: list[Event] = [Tick(self.now)]
        if due <= self.now:
            self.ends.popleft()
            events.append(self.executor.collect())
        while self.coming and self.coming[0][0] <= self.now:
            arrival, request = self.coming.popleft()
            self.served[request.id] = Served(request, arrival)
            events.append(Submit(request))
        packed = tuple(events)
        begin = time.perf_counter()
        transition = step(self.config, self.state, packed)
        took = time.perf_counter() - begin
        self._perform(transition)
        return took

    def _perform(self, transition: Transition) -> None:
        self.state, self.wake, self.turns = transition.state, math.inf, self.turns + 1
        self.most_running = max(self.most_running, len(self.state.running))
        for command in transition.commands:
            match command:
                case Execute(plan):
                    cost = self.cost(plan)
                    self.ends.append((self.ends[-1] if self.ends else self.now) + cost)
                    self.busy += cost
                    self.executor.launch(plan)
                case WakeAt(moment):
                    self.wake = moment
                case Emit():
                    self._note(command)
        for reason in transition.reasons:
            self.reasons[type(reason)] += 1
            if isinstance(reason, Admitted):
                one = self.served[reason.id]
                one.started, one.turn = min(one.started, self.now), min(one.turn, self.turns)

    def _note(self, emit: Emit) -> None:
        self.ended += emit.finished
        if self.successor is not None:  # nothing else is noted: timings are of the core
            when = self.ends[0] if self.ends else self.now
            for end in emit.finished:
                del self.served[end.id]
                self.coming.append((when, self.successor()))
            return
        for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
            if tokens:
                one = self.served[name]
                one.first, one.last = min(one.first, self.now), self.now
