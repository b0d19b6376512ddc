"""Simulation: the real engine on a virtual clock, with a model of the cost of steps.

Theory. A turn is taken as the live driver takes it: if steps are in flight it waits for
the first of them, else for an arrival or for the requested wake-up time; arrivals
meanwhile enter the same turn. A step begins when its launch does and the one before it
has ended. If host and device alternate, as on a CPU, it begins when its results are
collected. So two things are modelled, durations of steps and numbers of tokens; every
decision is the engine's own.

The acceptance of drafts is decided by coins (`minfer.simulation.guesses`). A row that
yields fewer tokens than its maximum makes the starts in the plans in flight after it too
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
from minfer.journal.overrides import OverrideCounts
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
from minfer.records.sequence import NEVER, SampleId
from minfer.records.state import EngineState, Turn, initial
from minfer.records.token_logprobs import Logprobs
from minfer.simulation.collector import paused_collector
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import Guesses
from minfer.simulation.oracle import Oracle
from minfer.simulation.simulated_engine import SimulatedEngine
from minfer.simulation.steady import SteadyTurns

Arrival = tuple[float, Request | Cancel]  # seconds
# consecutive turns without an event or a plan, after which none is expected any more
IDLE: Final = 10_000


class ArrivalQueue(deque[Arrival]):
    """Arrivals that are read one by one; more may be added at any time."""

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        if not self:
            raise StopIteration
        return self.popleft()


@frozen
class _SpecialRow:
    """A row that does not simply yield 0s to its limit."""

    end: float  # the position of its last token
    stop_token: int  # its last token id
    other_token: int  # the token id of all others


# the yield of a row: a token id without a meaning
_ZEROS: Final = [(0,) * k for k in range(65)]
_NO_STOP: Final = _SpecialRow(math.inf, 0, 0)


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
        # By step and run id: how much earlier a row starts than in its plan.
        self.start_excess: dict[int, dict[int, int]] = {}
        self.special_rows: dict[int, _SpecialRow] = {}  # by row
        self.num_yields: tuple[int, ...] = ()  # of the last plan, and its yields
        self.zero_yields: Yields = ()
        if state is not None:
            run = state.running
            for row, seq, last in zip(run.rows, run.seqs, run.last_index, strict=True):
                request = seq.request
                self._open_row(row, seq.id, len(request.prompt), last, request.stop_ids)
            self.plans.extend(state.inflight)
            self.start_excess = _start_excess(state)

    def collect(self) -> Executed | Failed:
        """Run the next plan; masks take no time."""
        if self.plans[0].deferred:
            self.sample(SampleDeferred(self.plans[0].step))
        return super().collect()

    def steady_yields(self) -> tuple[int, Yields]:
        """The number of next steps in which each row yields the same token, if these have
        decode rows alone; and that token of each row.
        """
        plan, max_turns = self.plans[0], NEVER
        if self.start_excess:
            return 0, ()
        if not self.special_rows:
            return max_turns, ((0,),) * len(plan.rows)
        yields = []
        for row, start in zip(plan.rows, plan.starts, strict=True):
            special = self.special_rows.get(row, _NO_STOP)
            yields.append((special.other_token,))
            if special.end < math.inf:
                max_turns = min(max_turns, int(special.end) - start - 1)
        return max(0, max_turns), tuple(yields)

    def fail(self, error: str, *, halfway: bool) -> Failed:
        """Fail the next plan and drop all after it."""
        failed = super().fail(error, halfway=halfway)
        self.start_excess.clear()
        return failed

    def finish_move(self, index: int = 0, error: str = "") -> Moved | Lost:
        """End a transfer that has begun. It has no memory to copy, and what the external
        store is believed to have is there.
        """
        command = self.moves[index]
        del self.moves[index]
        return Lost(command.number, error) if error else Moved(command.number)

    def _open_row(
        self, row: int, name: SampleId, prompt: int, last: int, stop_ids: frozenset[int]
    ) -> None:
        """Record how a row differs from running to its limit with the token `last`."""
        self.names[row] = name
        self.special_rows.pop(row, None)
        if not stop_ids:
            return
        end = math.inf
        if name in self.lengths and prompt + self.lengths[name] - 1 < last:
            end = prompt + self.lengths[name] - 1
        other_token = next(token for token in count() if token not in stop_ids)
        if end < math.inf or other_token:
            self.special_rows[row] = _SpecialRow(end, min(stop_ids), other_token)

    def _logprobs(self, plan: Plan, yields: Yields) -> Logprobs:  # noqa: ARG002  # none
        return ()

    def _pooled(self, plan: Plan) -> Pooled:  # noqa: ARG002  # it has no vectors
        return ()

    # It is turned into a tuple.
    def _run(self, plan: Plan) -> Yields:  # type: ignore[override]
        for opened in plan.opens:
            stop_ids = opened.sampling.stop_ids
            row = plan.rows[opened.index]
            self._open_row(row, opened.name, opened.prompt, opened.last_index, stop_ids)
        excess = self.start_excess.pop(plan.step, None)
        num_yields, positions = plan.max_sampled_tokens, tuple[int, ...]()
        if excess or plan.drafts:
            num_yields, positions = self._verified_rows(plan, excess or {})
        if num_yields is not self.num_yields:
            self.num_yields = num_yields
            self.zero_yields = tuple(
                [_ZEROS[m] if m < 65 else (0,) * m for m in num_yields]
            )
        if not self.special_rows:
            return self.zero_yields
        positions = positions or tuple(
            map(add, plan.starts, plan.num_scheduled_tokens)
        )  # the first token's position
        specials = [self.special_rows.get(row, _NO_STOP) for row in plan.rows]
        ends = [-1 if special.other_token else special.end for special in specials]
        yields = list(self.zero_yields)
        reaches_end = map(gt, map(add, positions, num_yields), ends)
        for i in compress(range(len(yields)), reaches_end):
            special, size = specials[i], num_yields[i]
            stop_index = max(0, min(size, special.end - positions[i]))
            yields[i] = tuple(
                special.stop_token if k == stop_index else special.other_token
                for k in range(size)
            )
        return tuple(yields)

    def _verified_rows(
        self, plan: Plan, excess: Mapping[int, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The number of tokens of each row of a plan, and the position of its first one,
        if some rows have drafts or are late.
        """
        num_yields, positions = (
            list(plan.max_sampled_tokens),
            list(map(add, plan.starts, plan.num_scheduled_tokens)),
        )
        for i, run_id in enumerate(plan.run_ids) if excess else ():
            positions[i] -= excess.get(run_id, 0)
        for draft in plan.drafts:
            i = draft.index
            count = plan.num_scheduled_tokens[i] - 1
            positions[i] -= count
            # Results of rows that left are dropped.
            name = self.names.get(plan.rows[i])
            num_accepted = count
            if name is not None:
                num_accepted = self.guesses.accepted(name, positions[i], count)
            num_yields[i] = 1 + num_accepted
            num_rejected = plan.max_sampled_tokens[i] - num_yields[i]
            run_id = plan.run_ids[i]
            for later_plan in self.plans if num_rejected else ():
                later_excess = self.start_excess.setdefault(later_plan.step, {})
                later_excess[run_id] = later_excess.get(run_id, 0) + num_rejected
        return tuple(num_yields), tuple(positions)


def _start_excess(state: EngineState) -> dict[int, dict[int, int]]:
    """For plans in flight, by step and run id: how much earlier a row starts than in
    the plan.
    """
    excess = dict[int, dict[int, int]]()
    run = state.running
    last_positions = [num_known - 1 for num_known in run.known]
    next_starts = dict(zip(run.run_ids, last_positions, strict=True))
    for plan in state.inflight:
        filled = {fill.index for fill in plan.fills}
        for i, run_id in enumerate(plan.run_ids):
            if run_id not in next_starts or i in filled:
                next_starts[run_id] = plan.starts[i] + plan.num_scheduled_tokens[i]
                continue
            if difference := plan.starts[i] - next_starts[run_id]:
                excess.setdefault(plan.step, {})[run_id] = difference
            next_starts[run_id] += plan.max_sampled_tokens[i]
    return excess


@define
class Simulation:
    """An engine on a virtual clock. `arrivals` are in order of time. A reader of the
    turns may add arrivals if they are `ArrivalQueue`: they are read again at every turn.

    Python's garbage collector is paused while it runs.

    `overrides` counts the policy's answers that could not be used, of which the first is
    a PolicyWarning, as is a method with nearly a name of the protocol; with
    `OverrideCounts(strict=True)` either is a PolicyOverrideError.
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
    overrides: OverrideCounts = field(factory=OverrideCounts)

    def turns(self) -> Iterator[Turn]:
        """Take turns until everything has been served, or nothing can happen any more: no
        event or plan for `IDLE` turns in a row, as under a policy that defers forever.
        """
        with paused_collector():
            for turn in self._run(skips=False):
                if isinstance(turn, Turn):  # as all are
                    yield turn

    def spans(self) -> Iterator[Turn | SteadyTurns]:
        """The same turns as `turns` takes, but those of a steady decode as one, which is
        faster where few requests run at once.
        """
        with paused_collector():
            yield from self._run(skips=True)

    def _run(self, *, skips: bool) -> Iterator[Turn | SteadyTurns]:
        engine = SimulatedEngine(
            self.config,
            self.executor,
            self.cost,
            self.state,
            self.time,
            self.number,
            self.step,
            self.guesses,
            self.overrides,
        )
        arrivals = iter(self.arrivals)
        coming = None  # the next arrival
        while engine.idle < IDLE:
            coming = coming or next(arrivals, None)
            next_arrival = coming[0] if coming else math.inf
            now = engine.due(next_arrival)
            if now == math.inf:
                return
            if skips and (steady := engine.take_steady(next_arrival)) is not None:
                yield steady
                continue
            arrived: list[Event] = []
            while coming and coming[0] <= now:
                event = coming[1]
                arrived.append(Submit(event) if isinstance(event, Request) else event)
                coming = next(arrivals, None)
            turn = engine.take(now, arrived)
            yield turn
            engine.launch(turn)
