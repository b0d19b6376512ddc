"""Drafts that no row may have, or that a row lacks, are named."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.planning import plan_drafts as drafting
from minfer.planning import schedule as scheduling
from minfer.policies.builtin import Priority
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.drafting import Proposed
from minfer.records.messages import Execute, Propose, Submit, Tick
from minfer.records.plan import Draft, Plan
from minfer.records.speculation import Speculation
from minfer.records.state import Transition, Turn
from minfer.testing.draft_laws import may_wait_to_draft
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from tests.core.speculate.drafted import (
    BOTH,
    FLAT,
    HOSTED,
    ON_DEVICE,
    SOLO,
    begun,
    nothing,
    right,
)
from tests.core.test_engine import ask
from tests.core.testing.turns import planned, plans

BUDGET = (64,) * 9


def drafting_turn(how: Speculation, config: EngineConfig = SOLO) -> Turn:
    """A turn in which a row has four drafts, and another one none that is its own."""
    first = ask("a", 3, 30)
    wishes = [first, ask("bb", 3, 30, needs_host_mask=True)]
    bench = begun(how, *wishes, guess=nothing, config=config)
    bench.guess = lambda w, at: right(w, at) if w[:3] == first.prompt else ()
    bench.turn()
    turn = bench.turns[-1]
    (plan,) = plans(turn)
    assert plan.num_scheduled_tokens == (5, 1)
    return turn


def judged(
    turn: Turn,
    wrong: Transition,
    law: str,
    how: Speculation,
    budgets: tuple[int, ...] = BUDGET,
) -> None:
    """The law names the turn, if it ended so."""
    mine = evolve(SOLO, speculation=how)
    with pytest.raises(InvariantError, match=law):
        Ledger.at(mine, turn.before).take(turn.events, wrong, budgets)


@BOTH
def test_as_it_is_it_is_right(how: Speculation) -> None:
    turn = drafting_turn(how)
    ledger = Ledger.at(evolve(SOLO, speculation=how), turn.before)
    ledger.take(turn.events, turn.transition, BUDGET)


def fewer(turn: Turn, *counts: int) -> Transition:
    """The rows that have drafts have so many, and the state knows it."""
    (plan,) = plans(turn)
    had, scheduled = plan.num_scheduled_tokens, [*turn.transition.state.running.scheduled]
    columns, drafts = [*had], list[Draft]()
    for draft, count in zip(plan.drafts, counts, strict=True):
        columns[draft.index] = 1 + count
        scheduled[draft.index] -= had[draft.index] - 1 - count
        if count:
            drafts.append(evolve(draft, tokens=draft.tokens[:count]))
    column = tuple(columns)
    wrong = planned(
        turn, num_scheduled_tokens=column, max_sampled_tokens=column, drafts=tuple(drafts)
    )
    run = evolve(wrong.state.running, scheduled=tuple(scheduled))
    return evolve(wrong, state=evolve(wrong.state, running=run))


WRONG: dict[str, Callable[[Turn, Plan], Transition]] = {
    "drafts: a row has drafts twice": lambda t, p: planned(t, drafts=p.drafts * 2),
    r"drafts: \('bb', 0\) (must not|has \(.*of None)": lambda t, p: planned(
        t,
        num_scheduled_tokens=(1, 5),
        max_sampled_tokens=(1, 5),
        drafts=(evolve(p.drafts[0], index=1),),
    ),
    r"drafts: \('a', 0\) has 3 of 4": lambda t, _: fewer(t, 3),
    r"drafts: \('a', 0\) has 0 of 4": lambda t, _: fewer(t, 0),
}


@BOTH
@pytest.mark.parametrize("law", WRONG)
def test_a_wrong_plan_is_named(how: Speculation, law: str) -> None:
    turn = drafting_turn(how)
    judged(turn, WRONG[law](turn, plans(turn)[0]), f"{law}|apart|coverage|feed", how)
    if "must not" not in law:
        judged(turn, WRONG[law](turn, plans(turn)[0]), law, how)


@BOTH
def test_other_settings_would_not_allow_it(how: Speculation) -> None:
    turn = drafting_turn(how)
    few = evolve(how, drafts=3)
    judged(turn, turn.transition, r"drafts: .* has 4", few)
    judged(turn, turn.transition, r"drafts: .* has 4", evolve(how, rows=1))
    judged(turn, turn.transition, "drafts: 6 inputs, .* of 5", how, (5,))
    measured = evolve(how, adaptive=True, costs=Costs(((5, 1.0),)))
    judged(turn, turn.transition, "drafts: 6 inputs, of at most 5", measured)
    enough = evolve(how, adaptive=True, costs=FLAT)
    ledger = Ledger.at(evolve(SOLO, speculation=enough), turn.before)
    ledger.take(turn.events, turn.transition, BUDGET)


@BOTH
def test_drafts_take_as_much_room_as_the_deepest_of_each_row(how: Speculation) -> None:
    wishes = [ask("a", 3, 30), ask("bb", 3, 30)]
    turn = begun(how, *wishes, config=SOLO, turns=1).turns[-1]
    (plan,) = plans(turn)
    assert plan.num_scheduled_tokens == (5, 5)
    judged(turn, fewer(turn, 4, 1), "drafts: 10 inputs, .* of 9", how, (9,))
    judged(turn, fewer(turn, 4, 1), r"drafts: .* has 1 of 4", how, (10,))
    judged(turn, fewer(turn, 4, 0), r"drafts: .* has 4 of 3", how, (9,))


def test_without_speculation_there_are_none() -> None:
    turn = drafting_turn(ON_DEVICE)
    with pytest.raises(InvariantError, match="drafts: there is no speculation"):
        Ledger.at(SOLO, turn.before).take(turn.events, turn.transition, BUDGET)


def test_what_the_host_drafts_is_what_it_proposed() -> None:
    turn = drafting_turn(HOSTED)
    for tokens in ((), (1, 2, 3, 4), (0,)):
        wrong = planned(turn, drafts=(Draft(0, tokens),))
        judged(turn, wrong, r"drafts: \('a', 0\) has \(", HOSTED)
    turn = drafting_turn(ON_DEVICE)
    wrong = planned(turn, drafts=(Draft(0, (1, 2, 3, 4)),))
    judged(turn, wrong, r"drafts: .* has \(1", ON_DEVICE)
    judged(turn, turn.transition, r"drafts: .* has \(\), of None", HOSTED)


def test_stale_proposals_are_not_used() -> None:
    """A scheduler that forgets to look uses what was said behind other tokens."""
    bench = begun(HOSTED, ask("a", 3, 30), guess=nothing, config=SOLO, turns=2)
    known = bench.state.running.known[0]
    with pytest.MonkeyPatch.context() as patch:
        found = drafting._proposed_for(HOSTED, bench.state)
        assert not found
        patch.setattr(
            drafting,
            "_proposed_for",
            lambda *_: drafting.Drafters((0,), (2,), ((1, 2),)),
        )
        for late in (known, known + 9):
            bench.ledger = Ledger.at(bench.config, bench.state)
            with pytest.raises(InvariantError, match="drafts"):
                bench.turn(Propose("a", 0, late, (1, 2)))


def test_nothing_is_planned_before_or_behind_what_the_host_drafts() -> None:
    """A scheduler that does not wait is named, whether it uses what it has or not."""
    for guess, law in ((right, "does not wait"), (nothing, "behind some")):
        bench = begun(HOSTED, ask("a", 3, 30), ask("bb", 3, 30), guess=nothing, turns=1)
        with pytest.MonkeyPatch.context() as patch:
            if law == "behind some":
                bench.guess = right
                while not bench.plans[-1].drafts:
                    bench.turn()
                bench.guess = guess
            patch.setattr(scheduling, "waits_for_results", lambda *_: False)
            bench.guess = guess
            with pytest.raises(InvariantError, match=f"drafts: .*{law}"):
                bench.give() if law == "behind some" else bench.turn()


def test_a_step_in_flight_before_drafts_of_the_host_is_named() -> None:
    bench = begun(HOSTED, ask("a", 3, 30), guess=nothing, turns=1)
    assert len(bench.state.inflight) == 2
    bench.turn()
    turn = bench.turns[-1]
    assert plans(turn)
    wrong = planned(
        turn, drafts=(Draft(0, (1,)),), num_scheduled_tokens=(2,), max_sampled_tokens=(2,)
    )
    with pytest.raises(InvariantError, match=r"drafts: a step is in flight|coverage"):
        Ledger.at(bench.config, turn.before).take(turn.events, wrong)


def test_blocks_that_are_there_are_taken() -> None:
    """Growth that forgets drafts leaves them cut at the table's end."""
    bench = begun(ON_DEVICE, ask("a", 6, 30), config=SOLO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            drafting, "grow_for_drafts", lambda _, state, __, grown: (state, grown)
        )
        done = bench.oracle.collect()
        bench.ledger = Ledger.at(bench.config, bench.state)
        before = bench.state
        events = (Tick(9.0), done)
        turn = step(bench.config, before, events)
    (plan,) = (c.plan for c in turn.commands if isinstance(c, Execute))
    assert plan.num_scheduled_tokens == (2,)
    with pytest.raises(InvariantError, match="drafts: 1 pages are not taken"):
        Ledger.at(bench.config, before).take(events, turn, BUDGET)


def test_who_may_wait() -> None:
    bench = begun(HOSTED, ask("a", 3, 30), guess=nothing, turns=1)
    books = Ledger.at(bench.config, bench.state).books
    assert books.flights
    assert not may_wait_to_draft(books)
    own = len(books.accounts["a", 0].tokens)
    device, none = (evolve(bench.config, speculation=one) for one in (ON_DEVICE, None))
    for known, may in ((3, False), (own, True)):
        proposals = bench.state.drafting.proposals.set(("a", 0), Proposed(known, (1,)))
        state = evolve(
            bench.state, drafting=evolve(bench.state.drafting, proposals=proposals)
        )
        for config, due in ((bench.config, may), (device, False), (none, False)):
            assert may_wait_to_draft(Ledger.at(config, state).books) is due
        state = evolve(state, inflight=())
        assert not may_wait_to_draft(Ledger.at(bench.config, state).books)


def test_waiting_for_nothing_is_named() -> None:
    """A scheduler that waits though no row has drafted leaves rows out."""
    bench = begun(HOSTED, ask("a", 3, 30), guess=nothing, turns=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "waits_for_results", lambda _, state: state.inflight)
        with pytest.raises(InvariantError, match="left out"):
            bench.turn()


def test_a_policy_of_ones_own_may_bound_them() -> None:
    class Sparing(Priority):
        def drafts(self, *_: Any) -> int:
            return 1

    config = evolve(SOLO, policy=Sparing())
    bench = begun(HOSTED, ask("a", 3, 30), config=config)
    bench.turn(Submit(ask("bb", 3, 30)))
    assert bench.plans[-1].num_scheduled_tokens[0] == 2
    bench.drain()
