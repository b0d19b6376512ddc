"""The engine on a virtual clock: the real `step`, and a model of what steps cost.

Theory. A turn is taken as the live driver takes it: if steps are in flight it waits for
the first of them, else for an arrival or for the time that the engine asked for; what
arrived meanwhile enters the same turn. A step begins when its launch does and the one
before it has ended. Where host and device take turns, as on a CPU, it begins when its
results are asked for. So two things are modelled, durations of steps and the tokens'
number; every decision is the engine's own.

Turns can be folded as they come, so a simulation keeps no more than what it is serving.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, count
from operator import add, gt
from typing import Any

from attrs import Factory, define, field, frozen

from minfer.config import ConfigError, EngineConfig, number
from minfer.engine import step
from minfer.messages import Cancel, Event, Execute, Submit, Tick, WakeAt
from minfer.plan import Plan, Yields
from minfer.request import Request
from minfer.runs.oracle import Oracle
from minfer.runs.turns import Step, blamed
from minfer.sequence import SampleId
from minfer.state import EngineState, Turn, initial

Arrival = tuple[float, Request | Cancel]  # seconds
_PLAIN = [(0,) * k for k in range(65)]  # what a row yields: a token id that means nothing
_NEVER = (math.inf, 0, 0)
# turns in a row without an event or a plan, after which none is expected any more
IDLE = 10_000


class Coming(deque[Arrival]):
    """Arrivals that are taken as they are asked for; more may be added at any time."""

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        if not self:
            raise StopIteration
        return self.popleft()


def work(plan: Plan) -> tuple[int, int, int, int, int]:
    """What a plan's cost is linear in, over all its forwards.

    Inputs from history; rows that feed themselves; chunks of history; positions that rows
    read; and positions that inputs from history attend to.
    """
    rows, chunks = len(plan.rows), len(plan.fills)
    if plan.repeat > 1:  # no chunks; row i takes part in the first most[i] forwards
        read = sum(
            m * (2 * s + m + 1) // 2 for s, m in zip(plan.starts, plan.most, strict=True)
        )
        return 0, sum(plan.most), 0, read, 0
    inputs, pairs = sum(plan.counts), 0
    for fill in plan.fills:
        size = len(fill.tokens)
        pairs += size * plan.starts[fill.index] + size * (size + 1) // 2
    return inputs - rows + chunks, rows - chunks, chunks, sum(plan.starts) + inputs, pairs


def _cost(**how: Any) -> Any:
    return field(validator=number(0, of="cost model: "), **how)


@frozen(kw_only=True)
class CostModel:
    """What steps cost, in seconds, linear in `work`. Raises ConfigError for what is below
    0.
    """

    name: str
    decode: tuple[
        tuple[int, float], ...
    ]  # a forward without history: rows up to, seconds
    mixed: float = _cost()  # a forward with inputs from history
    token: float = _cost()  # an input from history
    sequence: float = _cost(default=0.0)  # a row that feeds itself
    chunk: float = _cost(default=0.0)  # of a row's history
    context: float = _cost(default=0.0)  # a position that a row reads
    attention: float = _cost(
        default=0.0
    )  # a position that an input from history attends to
    host: float = _cost(default=0.0)  # a turn of the host
    # Of a step with more inputs from history than `captured`, if launching it, operation
    # by operation, takes the host `launch`, which so long learns of no other step's end:
    launch: float = _cost(default=0.0)
    captured: int = 0
    eager: float = _cost(default=0.0)  # its forward
    eager_token: float = _cost(default=0.0)  # an input from history
    overlaps: bool = True  # the device works while the host takes a turn

    def __attrs_post_init__(self) -> None:
        if not self.decode or not all(top > 0 and each >= 0 for top, each in self.decode):
            raise ConfigError("cost model: decode must be pairs of rows and seconds")

    def seconds(self, plan: Plan) -> float:
        """What the device takes for a plan; more rows than any bucket has cost as its
        last.
        """
        base, token = self.mixed, self.token
        if not plan.fills:
            count = len(plan.rows)
            base = next(
                (each for upto, each in self.decode if count <= upto), self.decode[-1][1]
            )
        elif self.launching(plan):
            base, token = self.eager, self.eager_token
        inputs, alone, chunks, read, pairs = work(plan)
        rows = self.sequence * alone + self.chunk * chunks + self.context * read
        return plan.repeat * base + rows + token * inputs + self.attention * pairs

    def launching(self, plan: Plan) -> float:
        """What launching a plan takes the host."""
        eager = self.launch and plan.fills and work(plan)[0] > self.captured
        return self.launch if eager else 0.0


class Simulated(Oracle):
    """An executor without a memory, whose samples end after so many output tokens.

    One that is not in `lengths`, or may not stop (no `stop_ids`), runs to its limit.
    Positions are read off plans, so it can take over from any `state` in mid-run, steps
    in flight included.
    """

    def __init__(
        self,
        lengths: Mapping[SampleId, int] | None = None,
        state: EngineState | None = None,
    ) -> None:
        super().__init__(block_size=1, vocab=0)  # both are of the memory
        self.lengths = {} if lengths is None else lengths
        self.odd: dict[
            int, tuple[float, int, int]
        ] = {}  # row -> its end, stop id, other tokens
        self.most: tuple[int, ...] = ()  # of the last plan, and what that yields
        self.plain: Yields = ()
        if state is not None:
            run = state.running
            for row, seq, last in zip(run.rows, run.seqs, run.last, strict=True):
                request = seq.request
                self._seat(row, seq.id, len(request.prompt), last, request.stop_ids)
            self.plans.extend(state.inflight)

    def _seat(
        self, row: int, name: SampleId, prompt: int, last: int, stop_ids: frozenset[int]
    ) -> None:
        """Remember of a row what differs from running to its limit, the token `last`."""
        self.odd.pop(row, None)
        if stop_ids:
            end = prompt + self.lengths[name] - 1 if name in self.lengths else last
            other = next(token for token in count() if token not in stop_ids)
            if end < last or other:
                self.odd[row] = (end if end < last else math.inf), min(stop_ids), other

    # A tuple is made of it.
    def _run(self, plan: Plan) -> Yields:  # type: ignore[override]
        for opened in plan.opens:
            stop_ids = opened.sampling.stop_ids
            row = plan.rows[opened.index]
            self._seat(row, opened.name, opened.prompt, opened.last, stop_ids)
        if plan.most is not self.most:
            self.most = plan.most
            self.plain = tuple([_PLAIN[m] if m < 65 else (0,) * m for m in plan.most])
        if not self.odd:
            return self.plain
        at = tuple(map(add, plan.starts, plan.counts))  # the first token's position
        odd = [self.odd.get(row, _NEVER) for row in plan.rows]
        due = [-1 if other else end for end, _, other in odd]
        out = list(self.plain)
        for i in compress(range(len(out)), map(gt, map(add, at, plan.most), due)):
            (end, stop, other), size = odd[i], plan.most[i]
            ends = max(0, min(size, end - at[i]))
            out[i] = tuple(stop if k == ends else other for k in range(size))
        return tuple(out)


@define
class Simulation:
    """An engine on a virtual clock. `arrivals` are in order of time. Whoever reads the
    turns may add to them if they are `Coming`: they are asked again at every turn.
    """

    config: EngineConfig
    executor: Oracle
    cost: CostModel
    arrivals: Iterable[Arrival]
    state: EngineState = Factory(lambda self: initial(self.config), takes_self=True)
    time: float = 0.0  # at which it starts
    number: int = 0  # of the first turn
    step: Step = step

    def turns(self) -> Iterator[Turn]:
        """Take turns until everything has been served, or nothing can happen any more:
        not for `IDLE` turns in a row, of which a policy that puts everybody off asks for
        more and more.
        """
        cost, state, number, free, done = (
            self.cost,
            self.state,
            self.number,
            self.time,
            self.time,
        )
        flights = deque(
            (free, cost.seconds(plan)) for plan in state.inflight
        )  # launched, takes
        wake = free if state.requests else math.inf
        arrivals, coming, idle = iter(self.arrivals), None, 0
        while idle < IDLE:
            coming = coming or next(arrivals, None)
            if flights:
                launched, takes = flights.popleft()
                done = max(done, launched if cost.overlaps else free) + takes
                now = max(free, done)
                events: list[Event] = [Tick(now), self.executor.collect()]
            else:
                now = max(free, min(wake, coming[0] if coming else math.inf))
                if now == math.inf:
                    return
                events = [Tick(now)]
            while coming and coming[0] <= now:
                what = coming[1]
                events.append(Submit(what) if isinstance(what, Request) else what)
                coming = next(arrivals, None)
            with blamed(number, state):
                transition = self.step(self.config, state, tuple(events))
            yield Turn(number, state, tuple(events), transition)
            state, number, wake, free = (
                transition.state,
                number + 1,
                math.inf,
                now + cost.host,
            )
            plans = [one.plan for one in transition.commands if isinstance(one, Execute)]
            while len(flights) + len(plans) > len(state.inflight):
                flights.pop()  # a step failed, and these with it
            idle = 0 if plans or len(events) > 1 else idle + 1
            for plan in plans:
                self.executor.launch(plan)
                flights.append((free, cost.seconds(plan)))
                free += cost.launching(plan)
            wake = min(
                (c.time for c in transition.commands if isinstance(c, WakeAt)),
                default=wake,
            )
