"""The specification of decisions: admissions, preemptions, and launched plans.

Reasons and plans are two separate lists. `read_decisions` puts them into the order in
which they must have been made (an admitted sample is opened by the next plan; a preempted
one was in the plans before), writes them into the books, and has each plan checked
(`minfer.testing.plan_laws`) at its place.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from attrs import define

from minfer.lifecycle.transitions import Cause, Stage
from minfer.records.messages import Admitted, Execute, Missed, Preempted
from minfer.records.plan import Plan
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition
from minfer.testing.accounts import NOT_SEEN, SampleAccount, Seat, tables_of
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require
from minfer.testing.plan_laws import Planning, check_plan
from minfer.testing.skipped_rows import suspects


def read_decisions(
    books: Books,
    before: EngineState,
    turn: Transition,
    budgets: Sequence[int] | None,
    held_back: Collection[str] | None = None,
) -> Planning:
    """Read the decisions of a turn. Raises InvariantError.

    `budgets`, if they were recorded, are the policy's answers for each plan, and
    `held_back` the clients that it deferred.
    """
    plans = deque(c.plan for c in turn.commands if isinstance(c, Execute))
    planning = Planning(None if budgets is None else list(budgets), held_back)
    planning.preempts = any(isinstance(one, Preempted) for one in turn.reasons)
    reader = _Reader(books, before, turn, plans, planning)
    for number, reason in enumerate(turn.reasons):
        if isinstance(reason, Admitted):
            reader.admitted(reason)
        elif isinstance(reason, Preempted):
            reader.preempted(reason, number)
    while plans:
        reader.launch()
    return planning


@define(eq=False)
class _Reader:
    """Reads reasons one after the other, and plans as they become due."""

    books: Books
    before: EngineState
    turn: Transition
    plans: deque[Plan]  # that have not been read
    planning: Planning

    def _served(self, reason: Admitted | Preempted) -> SampleAccount:
        one = self.books.accounts.get((reason.id, reason.sample))
        if one is None:
            raise InvariantError("reason", f"{reason} of a sample that is not served")
        return one

    def admitted(self, got: Admitted) -> None:
        """Read an admission: the next plan opens the sample's row."""
        one = self._served(got)
        sits = one.paused or suspects(self.books.config, [one])
        if sits and not any(one.id in _opened(plan) for plan in self.plans):
            self._sits(one, got)
            return
        while self.plans and one.id not in _opened(self.plans[0]):
            self.launch()
        require(self.plans, "reason", f"{got}, but no plan opens its row")
        books, plan = self.books, self.plans[0]
        self._check_admission(one, got)
        one.cached = max(one.cached, got.cached)
        self.planning.fresh |= one.stage is Stage.WAITING
        books.move(one, Cause.ADMITTED)
        at = _opened(plan)[one.id]
        one.seat = Seat(
            account=one,
            gen=plan.run_ids[at],
            row=plan.rows[at],
            base=len(one.known),
            scheduled=got.hit + got.copied,
            kv=got.hit,
            tables=next(opened.tables for opened in plan.opens if opened.index == at),
        )
        books.seats[one.seat.gen] = one.seat
        self.planning.newcomers[one.id] = got
        self.planning.admitted.append(one.id)

    def _sits(self, one: SampleAccount, got: Admitted) -> None:
        """Read an admission that no plan shows yet: the state is trusted, until a plan
        opens the row.
        """
        require(not got.copied, "reason", f"{got}, but no plan copies it")
        self._check_admission(one, got)
        one.cached = max(one.cached, got.cached)
        self.books.move(one, Cause.ADMITTED)
        run = self.turn.state.running
        at = run.ids.index(one.id) if one.id in run.ids else None
        one.seat = Seat(
            account=one,
            gen=NOT_SEEN,
            row=NOT_SEEN if at is None else run.rows[at],
            base=len(one.known),
            scheduled=got.hit,
            kv=got.hit,
            tables=() if at is None else tables_of(run, at),
        )
        self.planning.sitting.add(one.id)
        self.planning.admitted.append(one.id)

    def _check_admission(self, one: SampleAccount, got: Admitted) -> None:
        """Check that the figures of an admission are true, as far as the books show."""
        size = self.books.config.block_size
        waited = self.books.time - one.arrived
        require(got.waited == waited, "reason", f"{got}: not its wait")
        known = len(one.known)
        require(got.known == known, "reason", f"{got}: {known} are known")
        first = one.stage is Stage.WAITING and not one.request.continues
        prompt = len(one.request.prompt) if first else 0
        share = (min(got.hit, prompt), prompt)
        require((got.cached, got.prompt) == share, "hit share", f"{got}, not {share}")
        full = (known - 1) // size
        right = got.hit % size == 0 and 0 <= got.hit <= full * size and got.copied >= 0
        require(right, "reason", f"{got} cannot be")
        whole = not (one.request.reads_cache or one.sample or one.output)
        require(not (whole and got.hit), "reason", f"{got} was to compute its prompt")
        missing = [r for r in self.turn.reasons if isinstance(r, Missed)]
        missed = {(r.id, r.sample): r for r in missing}.get(one.id)
        less = None if got.hit == full * size else Missed(*one.id, got.hit // size, full)
        require(missed == less, "reason", f"{missed}, not {less}")

    def preempted(self, why: Preempted, number: int) -> None:
        """Read a preemption, by reason `number` of the turn; the sample was in the plans
        that were made before.
        """
        one = self._served(why)
        later = self.turn.reasons[number:]
        again = sum(isinstance(r, Admitted) and (r.id, r.sample) == one.id for r in later)
        while one.seat is not None and _planned(self.plans, one.seat, again):
            self.launch()
        places = {
            seq.id: seq.place for seq in (*self.before.running.seqs, *self.before.waiting)
        }
        running = [other.id for other in self.books.running]
        if one.id == max(running, key=lambda name: places.get(name, ())):
            self.planning.last_victims.add(one.id)
        self.books.move(one, Cause.PREEMPTED)
        if one.seat is not None:
            known, kv = len(one.known), one.seat.kv
            right = (why.known, why.computed) == (known, kv)
            require(right, "reason", f"{why}: it knows {known}, and has KV of {kv}")
        require(why.by in self.books.accounts, "reason", f"{why}: for an unknown sample")
        its = self.books.accounts[why.by]
        self.planning.fresh |= its.stage is Stage.WAITING
        self.planning.preempted.append((one.id, why.by))
        self.books.leave(one, [plan.step for plan in self.plans])

    def launch(self) -> None:
        """Read one more plan that goes to the device."""
        books, plan = self.books, self.plans.popleft()
        for name, at in _opened(plan).items():
            one = books.accounts.get(name)
            seat = one.seat if one is not None else None
            if seat is None or seat.opened:
                raise InvariantError("open", f"{name} is opened, and why?")
            books.seen(seat, plan.run_ids[at])
        check_plan(books, plan, self.turn.state, self.planning)
        fills = {fill.index for fill in plan.fills}
        for at, gen in enumerate(plan.run_ids):
            books.seats[gen].scheduled += (
                plan.num_scheduled_tokens[at]
                if at in fills
                else plan.max_sampled_tokens[at]
            )
        books.flights.append(books.flight(plan))
        self.planning.launched(plan)


def _opened(plan: Plan) -> dict[SampleId, int]:
    """The samples whose rows a plan opens, and their places in its columns."""
    return {one.name: one.index for one in plan.opens}


def _planned(plans: Iterable[Plan], seat: Seat, again: int) -> bool:
    """Whether a seat is in any of these plans, of which `requeue_rank` open its row for
    later ones.
    """
    if seat.gen == NOT_SEEN:
        return sum(seat.account.id in _opened(plan) for plan in plans) > again
    return any(seat.gen in plan.run_ids for plan in plans)
