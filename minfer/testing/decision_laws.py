"""The specification of decisions: admissions, preemptions, and launched plans.

Reasons and plans are two separate lists. `read_decisions` puts them into the order in
which they must have been made (an admitted sample is opened by the next plan; a preempted
one was in the plans before), writes them into the books, and has each plan checked
(`minfer.testing.plan_laws`) at its place.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import define

from minfer.lifecycle.transitions import Cause, Stage
from minfer.records.messages import Admitted, Execute, Missed, Preempted
from minfer.records.plan import Plan
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition
from minfer.testing.accounts import (
    NOT_SEEN,
    SampleAccount,
    Seat,
    state_key,
    tables_of,
)
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require
from minfer.testing.plan_laws import Planning, check_plan
from minfer.testing.skipped_rows import suspects

NOTHING_LOST: Final = MappingProxyType[SampleId, tuple[int, int]]({})


def read_decisions(
    books: Books,
    before: EngineState,
    turn: Transition,
    budgets: Sequence[int] | None,
    deferred: Collection[str] | None = None,
    lost: Mapping[SampleId, tuple[int, int]] = NOTHING_LOST,
) -> Planning:
    """Read the decisions of a turn. Raises InvariantError.

    `budgets`, if they were recorded, are the policy's answers for each plan, and
    `deferred` the clients that it deferred. The working states of the samples `lost` are
    lost, so that they are preempted, with so many known tokens, and KV of so many.
    """
    plans = deque(c.plan for c in turn.commands if isinstance(c, Execute))
    planning = Planning(None if budgets is None else list(budgets), deferred)
    suspected = (account for account in books.accounts.values() if account.faults)
    if any(account.seat is None or account.id in lost for account in suspected):
        planning.budgets = None  # a suspect may be admitted by a step without a plan
    planning.preempts = any(isinstance(reason, Preempted) for reason in turn.reasons)
    reader = _Reader(books, before, turn, plans, planning, lost)
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
    lost: Mapping[SampleId, tuple[int, int]]

    def _account_of(self, reason: Admitted | Preempted) -> SampleAccount:
        account = self.books.accounts.get((reason.id, reason.sample))
        if account is None:
            raise InvariantError("reason", f"{reason} of a sample that is not served")
        return account

    def admitted(self, admission: Admitted) -> None:
        """Read an admission: the next plan opens the sample's row."""
        account = self._account_of(admission)
        skips = account.paused or suspects(self.books.config, [account])
        if skips and not any(account.id in _opened_rows(plan) for plan in self.plans):
            self._admitted_unopened(account, admission)
            return
        while self.plans and account.id not in _opened_rows(self.plans[0]):
            self.launch()
        require(self.plans, "reason", f"{admission}, but no plan opens its row")
        books, plan = self.books, self.plans[0]
        self._check_admission(account, admission)
        account.cached = max(account.cached, admission.cached)
        self.planning.has_new |= account.stage is Stage.WAITING
        books.move(account, Cause.ADMITTED)
        index = _opened_rows(plan)[account.id]
        account.seat = Seat(
            account=account,
            run_id=plan.run_ids[index],
            row=plan.rows[index],
            num_known_at_admission=len(account.tokens),
            scheduled=admission.hit + admission.copied,
            kv=admission.hit,
            last_state=admission.hit,
            tables=next(opened.tables for opened in plan.opens if opened.index == index),
        )
        books.seats[account.seat.run_id] = account.seat
        self.planning.newcomers[account.id] = admission
        self.planning.admitted.append(account.id)

    def _admitted_unopened(self, account: SampleAccount, admission: Admitted) -> None:
        """Read an admission that no plan shows yet: the state is trusted, until a plan
        opens the row.
        """
        require(not admission.copied, "reason", f"{admission}, but no plan copies it")
        self._check_admission(account, admission)
        account.cached = max(account.cached, admission.cached)
        self.books.move(account, Cause.ADMITTED)
        run = self.turn.state.running
        index = run.ids.index(account.id) if account.id in run.ids else None
        account.seat = Seat(
            account=account,
            run_id=NOT_SEEN,
            row=NOT_SEEN if index is None else run.rows[index],
            num_known_at_admission=len(account.tokens),
            scheduled=admission.hit,
            kv=admission.hit,
            last_state=admission.hit,
            tables=() if index is None else tables_of(run, index),
        )
        if self.books.config.state_group and admission.hit and index is not None:
            key = state_key(self.books.config, account.seat, admission.hit)
            taken = account.seat.tables[-1] in self.books.states.get(key, ())
            account.seat.took_state = taken
        self.planning.unopened.add(account.id)
        self.planning.admitted.append(account.id)

    def _check_admission(self, account: SampleAccount, admission: Admitted) -> None:
        """Check that the figures of an admission are true, as far as the books show."""
        size = self.books.config.block_size
        waited = self.books.time - account.arrived
        require(admission.waited == waited, "reason", f"{admission}: not its wait")
        num_tokens = len(account.tokens)
        require(
            admission.known == num_tokens,
            "reason",
            f"{admission}: {num_tokens} are known",
        )
        first = account.stage is Stage.WAITING and not account.request.continues
        prompt = len(account.request.prompt) if first else 0
        share = (min(admission.hit, prompt), prompt)
        require(
            (admission.cached, admission.prompt) == share,
            "hit share",
            f"{admission}, not {share}",
        )
        full = (num_tokens - 1) // size
        is_possible = (
            admission.hit % size == 0
            and 0 <= admission.hit <= full * size
            and admission.copied >= 0
        )
        require(is_possible, "reason", f"{admission} cannot be")
        computes_all = not (
            account.request.reads_cache or account.sample or account.output
        )
        require(
            not (computes_all and admission.hit),
            "reason",
            f"{admission} was to compute its prompt",
        )
        missing = [r for r in self.turn.reasons if isinstance(r, Missed)]
        missed = {(r.id, r.sample): r for r in missing}.get(account.id)
        expected = (
            None
            if admission.hit == full * size
            else Missed(*account.id, admission.hit // size, full)
        )
        require(missed == expected, "reason", f"{missed}, not {expected}")

    def preempted(self, reason: Preempted, number: int) -> None:
        """Read a preemption, by reason `number` of the turn; the sample was in the plans
        that were made before.
        """
        name = reason.id, reason.sample
        if name in self.lost and name not in self.planning.requeued:
            self.planning.requeued.add(name)
            expected = Preempted(*name, name, *self.lost[name])
            require(reason == expected, "reason", f"{reason}, not {expected}")
            return
        account = self._account_of(reason)
        later = self.turn.reasons[number:]
        num_admissions = sum(
            isinstance(r, Admitted) and (r.id, r.sample) == account.id for r in later
        )
        while account.seat is not None and _planned(
            self.plans, account.seat, num_admissions
        ):
            self.launch()
        places = {
            seq.id: seq.place for seq in (*self.before.running.seqs, *self.before.waiting)
        }
        running = [running_account.id for running_account in self.books.running]
        if account.id == max(running, key=lambda name: places.get(name, ())):
            self.planning.last_victims.add(account.id)
        self.books.move(account, Cause.PREEMPTED)
        if account.seat is not None:
            num_tokens, kv = len(account.tokens), account.seat.kv
            is_true = (reason.known, reason.computed) == (num_tokens, kv)
            require(
                is_true, "reason", f"{reason}: it knows {num_tokens}, and has KV of {kv}"
            )
        require(
            reason.by in self.books.accounts, "reason", f"{reason}: for an unknown sample"
        )
        preempting = self.books.accounts[reason.by]
        self.planning.has_new |= preempting.stage is Stage.WAITING
        self.planning.preempted.append((account.id, reason.by))
        self.books.release_seat(account, [plan.step for plan in self.plans])

    def launch(self) -> None:
        """Read one more plan that goes to the device."""
        books, plan = self.books, self.plans.popleft()
        for name, index in _opened_rows(plan).items():
            account = books.accounts.get(name)
            seat = account.seat if account is not None else None
            if seat is None or seat.opened:
                raise InvariantError("open", f"{name} is opened, and why?")
            books.set_run_id(seat, plan.run_ids[index])
        check_plan(books, plan, self.turn.state, self.planning)
        fills = {fill.index for fill in plan.fills}
        for index, run_id in enumerate(plan.run_ids):
            books.seats[run_id].scheduled += (
                plan.num_scheduled_tokens[index]
                if index in fills
                else plan.max_sampled_tokens[index]
            )
        books.flights.append(books.flight(plan))
        self.planning.record(plan)


def _opened_rows(plan: Plan) -> dict[SampleId, int]:
    """The samples whose rows a plan opens, and their places in its columns."""
    return {row.name: row.index for row in plan.opens}


def _planned(plans: Iterable[Plan], seat: Seat, num_later: int) -> bool:
    """Whether a seat is in any of these plans, of which `requeue_rank` open its row for
    later ones.
    """
    if seat.run_id == NOT_SEEN:
        return sum(seat.account.id in _opened_rows(plan) for plan in plans) > num_later
    return any(seat.run_id in plan.run_ids for plan in plans)
