"""The specification of whole runs: a ledger that checks turn after turn.

It keeps books beside the engine (`minfer.testing.books`) and checks of every turn

- the outputs: tokens by sample, ends with their reason and length, ignored events, the
  cost of a failed step, in the order of the events (`minfer.testing.event_laws`);
- admissions and preemptions (`minfer.testing.decision_laws`), that each plan may be made
  of the running sequences (`minfer.testing.plan_laws`), and that each sample moves by the
  table of `minfer.lifecycle.transitions`;
- that the state after it is the one that follows (`minfer.testing.state_laws`);
- that as many sequences as possible were admitted (`minfer.testing.queue_laws`), and that
  a good step makes progress (`minfer.testing.progress`);
- that a key leads to exactly the tokens that were computed into its block
  (`minfer.testing.content_laws`), and that no collection of the state is larger than the
  present requests can make it (`minfer.testing.size_laws`).

`Ledger.take` checks a turn, state and all; `check_turn` is a ledger opened for one turn.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from attrs import Factory, define, field

from minfer.blocks.keys import Key
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Event,
    Failed,
    Finish,
    Pause,
    PolicyOverride,
    Submit,
)
from minfer.records.policy import Load, Policy
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition
from minfer.testing.accounts import TurnReport
from minfer.testing.adapter_laws import check_adapters, check_lost
from minfer.testing.books import Books
from minfer.testing.content_laws import BlockContents
from minfer.testing.decision_laws import read_decisions
from minfer.testing.event_laws import check_report, fold
from minfer.testing.invariants import check, may_defer, require
from minfer.testing.kept_state_laws import (
    check_kept,
    check_skipped,
    may_be_dropped,
    states_of,
)
from minfer.testing.plan_laws import Planning
from minfer.testing.policy_laws import check_policy_state
from minfer.testing.progress import Measure, check_progress, measure
from minfer.testing.queue_laws import check_evictions, check_free_order, check_queue
from minfer.testing.size_laws import check_sizes
from minfer.testing.state_laws import check_publication, check_state
from minfer.testing.tier_laws import check_losses, check_transfers

# events that change from outside how much work is left
_OUTSIDE: Final = (Submit, Cancel, Finish, Pause, Failed)


class RecordingPolicy:
    """A policy that records its answers: the budget of each step, and the clients that it
    deferred.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.budgets = list[int]()
        self.deferred = set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def budget(self, state: Any, load: Load) -> int:
        """The policy's own answer."""
        answer = self.policy.budget(state, load)
        self.budgets.append(answer)
        return answer

    def defer(
        self, state: Any, request: Request, load: Load, came: int
    ) -> tuple[bool, Any]:
        """The policy's own answer."""
        held, state = self.policy.defer(state, request, load, came)
        if held:
            self.deferred.add(request.client)
        return held, state


def check_turn(
    config: EngineConfig, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the engine may go from `before` to `turn` on these
    events.
    """
    Ledger.at(config, before).take(tuple(events), turn)


@define(eq=False)
class Ledger:
    """All records of the specification about a run, from turn to turn."""

    config: EngineConfig
    state: EngineState  # after the last turn
    books: Books = Factory(
        lambda self: Books(self.config, self.state.time), takes_self=True
    )
    contents: BlockContents = field(init=False)
    measure: Measure = field(factory=dict)  # work left of all samples
    # the policy was overridden at some time
    _overridden: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        has_begun = self.state.next_step or self.state.requests
        self.contents = BlockContents(from_start=not has_begun)

    @classmethod
    def at(cls, config: EngineConfig, state: EngineState) -> "Ledger":
        """A ledger opened at `state`, which it trusts."""
        books = Books.at(config, state)
        work_left = measure(books.accounts, state, passed=may_defer(config))
        return cls(config, state, books, work_left)

    def take(
        self,
        events: Sequence[Event],
        turn: Transition,
        budgets: Sequence[int] | None = None,
        deferred: Collection[str] | None = None,
    ) -> None:
        """Check one turn. Raises InvariantError with the name of the broken law.

        `budgets`, if they were recorded, are the policy's answers for each plan, and
        `deferred` the clients that it deferred.
        """
        check(self.config, turn.state)
        before, report = self.state, TurnReport()
        check_sizes(self.config, before, turn.state)
        self._overridden |= any(
            isinstance(reason, PolicyOverride) for reason in turn.reasons
        )
        if not self._overridden:  # all its answers were used
            check_policy_state(self.config, turn.state)
        self.books.released_seats.clear()
        self.books.filled.clear()
        self.books.saved.clear()
        self.books.skipped_saves.clear()
        self.books.states = states_of(self.config, before)
        for event in events:
            fold(self.books, event, report)
        check_report(report, turn)
        check_transfers(self.books, before, events, turn)
        check_losses(events, report.lost, turn)
        check_lost(report.lost_adapters, turn)
        lost = report.requeued
        planning = read_decisions(self.books, before, turn, budgets, deferred, lost)
        requeued = planning.requeued
        require(requeued == {*lost}, "states", f"{requeued} start again, not {lost}")
        check_adapters(self.books, before, turn, planning)
        check_state(self.books, turn.state)
        check_kept(self.books, before, events, turn.state)
        check_skipped(self.books, turn)
        check_publication(self.books, before, turn.state)
        check_queue(self.books, before, turn, planning)
        if not (
            planning.preempted or requeued
        ):  # else blocks may be taken and released again
            check_free_order(before.blocks.pool, turn.state.blocks.pool)
        outside = any(isinstance(event, _OUTSIDE) for event in events)
        # Samples whose blocks have come are counted again.
        outside |= before.tiers.loading - turn.state.tiers.loading != frozenset()
        self._progress(turn.state, planning, expected=report.progress and not outside)
        if turn.state.blocks.prefix.nodes is not before.blocks.prefix.nodes:
            dropped = set[Key]()
            if self.config.state_group is not None:
                dropped = may_be_dropped(before, turn.state)
            check_evictions(before.blocks.prefix, turn.state.blocks.prefix, dropped)
            self.contents.check(self.books, turn.state)
        self.state = turn.state

    def _progress(
        self, after: EngineState, planning: Planning, *, expected: bool
    ) -> None:
        """Check that less is left after a good step, if all victims were the last in
        rank.
        """
        may_pass = may_defer(self.config)
        work_left = measure(self.books.accounts, after, passed=may_pass)
        last_in_rank = all(
            victim in planning.last_victims for victim, _ in planning.preempted
        )
        # Samples that wait for adapters were not counted.
        joined = [*planning.admitted, *(by for _, by in planning.preempted)]
        accounts = [self.books.accounts.get(name) for name in joined]
        adapted = any(account and account.request.adapter for account in accounts)
        anew = adapted or (may_pass and planning.has_new)
        if expected and last_in_rank and not anew:
            check_progress(self.measure, work_left, planning.last_victims)
        self.measure = work_left
