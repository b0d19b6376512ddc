"""Simulation: the real engine on a virtual clock, with a model of the cost of steps.

Theory. A turn is taken as the live driver takes it: if steps are in flight it waits for
the first of them, else for an arrival or for the requested wake-up time; arrivals
meanwhile enter the same turn. A step begins when its launch does and the one before it
has ended. If host and device alternate, as on a CPU, it begins when its results are
collected. So two things are modelled, durations of steps and numbers of tokens; every
decision is the engine's own.

The acceptance of drafts is decided by coins (`minfer.simulation.guesses`). A row that
yields fewer tokens than its most makes the starts in the plans in flight after it too
late: they are upper bounds.

Turns can be folded as they come, so a simulation keeps only what it is serving.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, count
from operator import add, gt
from typing import Final

from attrs import Factory, define, field, frozen

from minfer.engine import step
from minfer.journal.turns import Step
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Event,
    Executed,
    Failed,
    Lost,
    Moved,
    Submit,
)
from minfer.records.plan import Plan, Pooled, SampleDeferred, Yields
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn, initial
from minfer.records.token_logprobs import Logprobs
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import Guesses
from minfer.simulation.oracle import Oracle
from minfer.simulation.simulated_engine import SimulatedEngine

Arrival = tuple[float, Request | Cancel]  # seconds
# consecutive turns without an event or a plan, after which none is expected any more
IDLE: Final = 10_000


class Coming(deque[Arrival]):
    """Arrivals that are read one by one; more may be added at any time."""

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        if not self:
            raise StopIteration
        return self.popleft()


@frozen
class _Odd:
    """A row that does not simply yield 0s to its limit."""

    end: float  # the position of its last token
    stop: int  # its last token id
    other: int  # the token id of all others


# the yield of a row: a token id without a meaning
_PLAIN: Final = [(0,) * k for k in range(65)]
_NEVER: Final = _Odd(math.inf, 0, 0)


class Simulated(Oracle):
    """An executor without a memory, whose samples end after given numbers of output
    tokens.

    A sample that is not in `lengths`, or may not stop (no `stop_ids`), runs to its limit:
    its own or the context's; one that would stop exactly there also ends by length.
    Positions are read from plans, so it can continue from any `state` in mid-run, with
    steps in flight.
    """

    def __init__(
        self,
        lengths: Mapping[SampleId, int] | None = None,
        state: EngineState | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        super().__init__(block_size=1, vocab=0)  # both are of the memory
        self.lengths = {} if lengths is None else lengths
        self.guesses = Guesses() if guesses is None else guesses
        self.names: dict[int, SampleId] = {}  # by row
        # By step and generation: how much earlier a row starts than in its plan.
        self.late: dict[int, dict[int, int]] = {}
        self.odd: dict[int, _Odd] = {}  # by row
        self.most: tuple[int, ...] = ()  # of the last plan, and its yields
        self.plain: Yields = ()
        if state is not None:
            run = state.running
            for row, seq, last in zip(run.rows, run.seqs, run.last_index, strict=True):
                request = seq.request
                self._seat(row, seq.id, len(request.prompt), last, request.stop_ids)
            self.plans.extend(state.inflight)
            self.late = _lateness(state)

    def collect(self) -> Executed | Failed:
        """Run the next plan; masks take no time."""
        if self.plans[0].deferred:
            self.sample(SampleDeferred(self.plans[0].step))
        return super().collect()

    def fail(self, error: str, *, halfway: bool) -> Failed:
        """Fail the next plan and drop all after it."""
        failed = super().fail(error, halfway=halfway)
        self.late.clear()
        return failed

    def finish_move(self, at: int = 0, error: str = "") -> Moved | Lost:
        """End a transfer that has begun. It has no memory to copy, and what the external
        store is believed to have is there.
        """
        command = self.moves[at]
        del self.moves[at]
        return Lost(command.number, error) if error else Moved(command.number)

    def _seat(
        self, row: int, name: SampleId, prompt: int, last: int, stop_ids: frozenset[int]
    ) -> None:
        """Record how a row differs from running to its limit with the token `last`."""
        self.names[row] = name
        self.odd.pop(row, None)
        if not stop_ids:
            return
        end = math.inf
        if name in self.lengths and prompt + self.lengths[name] - 1 < last:
            end = prompt + self.lengths[name] - 1
        other = next(token for token in count() if token not in stop_ids)
        if end < math.inf or other:
            self.odd[row] = _Odd(end, min(stop_ids), other)

    def _logprobs(self, plan: Plan, yields: Yields) -> Logprobs:  # noqa: ARG002  # none
        return ()

    def _pooled(self, plan: Plan) -> Pooled:  # noqa: ARG002  # it has no vectors
        return ()

    # It is turned into a tuple.
    def _run(self, plan: Plan) -> Yields:  # type: ignore[override]
        for opened in plan.opens:
            stop_ids = opened.sampling.stop_ids
            row = plan.rows[opened.index]
            self._seat(row, opened.name, opened.prompt, opened.last_index, stop_ids)
        late = self.late.pop(plan.step, None)
        most, at = plan.max_sampled_tokens, tuple[int, ...]()
        if late or plan.drafts:
            most, at = self._judged(plan, late or {})
        if most is not self.most:
            self.most = most
            self.plain = tuple([_PLAIN[m] if m < 65 else (0,) * m for m in most])
        if not self.odd:
            return self.plain
        at = at or tuple(
            map(add, plan.starts, plan.num_scheduled_tokens)
        )  # the first token's position
        odd = [self.odd.get(row, _NEVER) for row in plan.rows]
        due = [-1 if one.other else one.end for one in odd]
        out = list(self.plain)
        for i in compress(range(len(out)), map(gt, map(add, at, most), due)):
            one, size = odd[i], most[i]
            ends = max(0, min(size, one.end - at[i]))
            out[i] = tuple(one.stop if k == ends else one.other for k in range(size))
        return tuple(out)

    def _judged(
        self, plan: Plan, late: Mapping[int, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The number of tokens of each row of a plan, and the position of its first one,
        if some rows have drafts or are late.
        """
        most, at = (
            list(plan.max_sampled_tokens),
            list(map(add, plan.starts, plan.num_scheduled_tokens)),
        )
        for i, gen in enumerate(plan.run_ids) if late else ():
            at[i] -= late.get(gen, 0)
        for draft in plan.drafts:
            i = draft.index
            count = plan.num_scheduled_tokens[i] - 1
            at[i] -= count
            # Results of rows that left are dropped.
            name = self.names.get(plan.rows[i])
            right = count if name is None else self.guesses.accepted(name, at[i], count)
            most[i] = 1 + right
            short = plan.max_sampled_tokens[i] - most[i]
            for behind in self.plans if short else ():
                owed = self.late.setdefault(behind.step, {})
                owed[plan.run_ids[i]] = owed.get(plan.run_ids[i], 0) + short
        return tuple(most), tuple(at)


def _lateness(state: EngineState) -> dict[int, dict[int, int]]:
    """For plans in flight, by step and generation: how much earlier a row starts than in
    the plan.
    """
    found = dict[int, dict[int, int]]()
    run = state.running
    next_ = {gen: known - 1 for gen, known in zip(run.run_ids, run.known, strict=True)}
    for plan in state.inflight:
        filled = {fill.index for fill in plan.fills}
        for i, gen in enumerate(plan.run_ids):
            if gen not in next_ or i in filled:
                next_[gen] = plan.starts[i] + plan.num_scheduled_tokens[i]
                continue
            if plan.starts[i] != next_[gen]:
                found.setdefault(plan.step, {})[gen] = plan.starts[i] - next_[gen]
            next_[gen] += plan.max_sampled_tokens[i]
    return found


@define
class Simulation:
    """An engine on a virtual clock. `arrivals` are in order of time. A reader of the
    turns may add arrivals if they are `Coming`: they are read again at every turn.
    """

    config: EngineConfig
    executor: Oracle
    cost: CostModel
    arrivals: Iterable[Arrival]
    state: EngineState = Factory(lambda self: initial(self.config), takes_self=True)
    time: float = 0.0  # at which it starts
    number: int = 0  # of the first turn
    step: Step = step
    guesses: Guesses = field(factory=Guesses)  # of drafts

    def turns(self) -> Iterator[Turn]:
        """Take turns until everything has been served, or nothing can happen any more: no
        event or plan for `IDLE` turns in a row, as under a policy that defers forever.
        """
        engine = SimulatedEngine(
            self.config,
            self.executor,
            self.cost,
            self.state,
            self.time,
            self.number,
            self.step,
            self.guesses,
        )
        arrivals = iter(self.arrivals)
        coming = None  # the next arrival
        while engine.idle < IDLE:
            coming = coming or next(arrivals, None)
            now = engine.due(coming[0] if coming else math.inf)
            if now == math.inf:
                return
            arrived: list[Event] = []
            while coming and coming[0] <= now:
                what = coming[1]
                arrived.append(Submit(what) if isinstance(what, Request) else what)
                coming = next(arrivals, None)
            turn = engine.take(now, arrived)
            yield turn
            engine.launch(turn)
