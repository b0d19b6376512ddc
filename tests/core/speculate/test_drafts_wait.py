"""What the host drafts waits for results, and nothing else does."""

import pytest
from attrs import evolve

from minfer.planning.plan_drafts import (
    waits_for_results,
)
from minfer.records.messages import Propose, Submit
from minfer.speculate.proposing import keep_proposals
from tests.core.speculate.drafted import (
    HOSTED,
    ON_DEVICE,
    ROOMY,
    begun,
    model_wrong,
    nothing,
    planned,
    right,
)
from tests.core.test_engine import ask


def test_a_step_that_the_host_drafts_for_waits_for_results_and_none_is_behind_it() -> (
    None
):
    wishes = [ask("a", 6, 30), ask("bb", 6, 30)]
    bench = begun(HOSTED, *wishes, guess=nothing, turns=1)
    assert bench.deep == 2
    bench.guess = right
    turn = bench.turn()
    assert not planned(turn), "what is in flight comes first"
    assert bench.deep == 1
    turn = bench.turn()
    (plan,) = planned(turn)
    assert bench.drafts(plan) == {"a": 4, "bb": 4}
    assert bench.state.inflight == (plan,), "and nothing is planned behind it"
    turn = bench.give()
    assert not planned(turn)
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


def test_no_other_sample_goes_on_meanwhile() -> None:
    """Who has no drafts of its own keeps the others' pace."""
    bench = begun(HOSTED, ask("a", 6, 30), ask("bb", 6, 30))
    bench.guess = lambda w, at: right(w, at) if w[:6] == ask("a").prompt else ()
    while not bench.plans[-1].drafts:
        bench.turn()
    assert bench.plans[-1].num_scheduled_tokens == (5, 1)
    assert not planned(bench.give())


def test_who_only_comes_waits_as_well() -> None:
    bench = begun(HOSTED, ask("a", 6, 30), turns=2)
    assert bench.plans[-1].drafts
    assert not planned(bench.give(Submit(ask("late"))))
    bench.turn()
    assert len(bench.plans[-1].run_ids) == 2


def test_stale_proposals_hold_up_nothing() -> None:
    bench = begun(HOSTED, ask("a", 6, 30), guess=nothing, turns=2)
    turn = bench.turn(Propose("a", 0, 3, (1,)), Propose("a", 0, 99, (1,)))
    assert len(planned(turn)) == 1
    assert bench.deep == 2


def test_while_a_prompt_takes_all_of_the_budget_nothing_waits() -> None:
    config = evolve(ROOMY, max_num_batched_tokens=8)
    bench = begun(HOSTED, ask("a", 6, 40), guess=nothing, config=config, turns=2)
    bench.guess = right
    bench.turn(Submit(ask("long", 40, 4)))
    while not bench.state.filling:
        bench.turn()
    seen = 0
    while (
        bench.state.running.num_known_at_admission[1] - bench.state.running.scheduled[1]
        > 8
    ):
        bench.turn()
        seen += 1
        assert bench.deep == 2
    assert seen >= 2
    bench.drain()
    for wish in (ask("a", 6, 40), ask("long", 40, 4)):
        assert bench.out[wish.id, 0] == bench.right(wish)


@pytest.mark.parametrize(("more", "waits"), [(0, False), (1, True)])
def test_what_prompts_leave_is_waited_for(more: int, waits: bool) -> None:
    config = evolve(ROOMY, max_num_batched_tokens=8)
    bench = begun(HOSTED, ask("a", 6, 40), guess=nothing, config=config, turns=2)
    bench.turn(Submit(ask("long", 40, 4)))
    bench.turn()
    run = bench.state.running
    left = run.num_known_at_admission[1] - run.scheduled[1]
    assert left > 8
    proposed = [Propose("a", 0, run.known[0], (1,))]
    state = keep_proposals(bench.config, bench.state, proposed).state
    budget = 1 + left + more
    mine = evolve(bench.config, max_num_batched_tokens=budget)
    assert waits_for_results(mine, state) is waits


def test_in_steps_of_too_many_rows_nothing_waits() -> None:
    wishes = [ask("a" * n, 6, 30) for n in (1, 2)]
    bench = begun(evolve(HOSTED, rows=1), *wishes, turns=2)
    for _ in range(3):
        bench.turn()
        assert bench.deep == 2
    few = begun(evolve(HOSTED, rows=2), *wishes, turns=2)
    assert few.deep == 1
    assert few.plans[-1].drafts


def test_proposals_for_the_last_token_hold_up_nothing() -> None:
    bench = begun(HOSTED, ask("a", 6, 3), ask("bb", 6, 30), guess=nothing, turns=1)
    run = bench.state.running
    assert run.known[0] == 7
    bench.guess = lambda w, at: (1,) if (w[0], at) == (ask("a").prompt[0], 8) else ()
    bench.turn()
    assert bench.state.running.known[0] == 8
    assert dict(bench.state.drafting.proposals) == {}, "a step was planned"
    assert bench.deep == 2


def test_a_draft_model_keeps_steps_in_flight() -> None:
    """Whatever the step before yields, a plan says where a row starts at the latest."""
    wishes = [ask("a", 6, 40), ask("bb", 6, 40)]
    with model_wrong(2):
        bench = begun(ON_DEVICE, *wishes)
        deep = 0
        while bench.state.requests:
            bench.turn()
            both = [plan for plan in bench.state.inflight if plan.drafts]
            deep += len(both) == 2
        assert deep > 5
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)
    steps = len(bench.plans)
    assert steps < 40, "fewer than tokens"
