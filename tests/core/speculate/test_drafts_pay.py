"""As many drafts as pay: of what was accepted, and of what a step costs."""

from typing import Any

import pytest
from attrs import evolve

from minfer.planning.plan_drafts import (
    Drafters,
    _numbers,
    waits_for_results,
)
from minfer.records.acceptance import Acceptance, Costs, Learning
from minfer.records.config import EngineConfig
from minfer.records.drafting import Drafting, SampleAcceptance
from minfer.records.messages import Propose, Submit
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.values.pmap import Map
from tests.core.speculate.drafted import (
    FLAT,
    HOSTED,
    ON_DEVICE,
    ROOMY,
    SOLO,
    Drafted,
    begun,
    model_wrong,
    nothing,
    planned,
    right,
    wrong,
)
from tests.core.test_engine import ask


def adaptive(drafter: str, costs: Costs = FLAT, **more: Any) -> Speculation:
    return Speculation(drafter=drafter, drafts=4, costs=costs, margin=0, **more)


STEEP = Costs(((1, 1.0), (2, 4.0), (64, 90.0)))  # the second input costs three more


@pytest.mark.parametrize("drafter", [HOST, DEVICE])
def test_what_does_not_pay_is_not_drafted_and_holds_up_nothing(drafter: str) -> None:
    bench = begun(adaptive(drafter, STEEP), ask("a", 6, 30))
    for _ in range(5):
        bench.turn()
        assert bench.deep == 2
    bench.drain()
    assert not any(plan.drafts for plan in bench.plans)
    assert not bench.state.drafting.learnt


def test_whether_to_wait_depends_on_all_inputs_of_the_step() -> None:
    """Of one row alone drafts would pay; beside three others they do not."""
    costs = Costs(((4, 1.0), (8, 9.0)))
    wishes = [ask("a" * n, 3, 30) for n in range(1, 5)]
    bench = begun(adaptive(HOST, costs), *wishes, guess=nothing, turns=3)
    bench.guess = lambda w, at: right(w, at) if w[:3] == wishes[0].prompt else ()
    for _ in range(4):
        bench.turn()
        assert bench.deep == 2
    solo = begun(adaptive(HOST, costs), wishes[0], turns=2)
    assert solo.deep == 1


def test_several_drafts_may_pay_where_one_does_not() -> None:
    """What they cost however few there are is shared: waiting counts them all."""
    costs = Costs(((64, 1.0),), fixed=0.8)
    how = adaptive(HOST, costs, learning=Learning(assumed=0.9))
    bench = begun(how, ask("a", 6, 30))
    bench.turn()
    assert not planned(bench.turn()) or bench.plans[-1].drafts
    while not bench.plans[-1].drafts and bench.state.requests:
        bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": 4}


@pytest.mark.long
@pytest.mark.parametrize("drafter", [HOST, DEVICE])
def test_who_is_always_wrong_is_given_up_and_tried_again(drafter: str) -> None:
    learning = Learning(assumed=0.5, weight=2.0, rested=0.95, kept=1.0)
    costs = Costs(((1, 1.0), (5, 1.2)))
    config = evolve(SOLO, num_blocks=200, max_model_len=400)
    how = adaptive(drafter, costs, learning=learning)
    with model_wrong(1):
        bench = begun(how, ask("a", 6, 300), guess=wrong, config=config)
        while bench.state.requests:
            bench.turn()
    had = [bool(plan.drafts) for plan in bench.plans[1:]]
    assert had[0], "tried"
    given_up = had.index(False)
    assert given_up < 9
    assert 2 < sum(had[given_up:]) < len(had) / 6, "and tried again, now and then"
    assert bench.out["a", 0] == bench.right(ask("a", 6, 300))


def test_the_likelier_row_has_more() -> None:
    """Of six places, who was right lately has four."""
    first, second = ask("a", 6, 50), ask("bb", 6, 50)
    costs = Costs(((2, 1.0), (8, 1.01), (16, 1.02)))
    how = adaptive(HOST, costs, learning=Learning(weight=0.5))
    bench = begun(how, first, second, config=evolve(SOLO, max_num_batched_tokens=7))

    def guess(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
        return (right if whole[:6] == second.prompt else wrong)(whole, known)

    bench.guess = guess
    for _ in range(4):
        bench.turn()
    assert bench.drafts(bench.plans[-1])["bb"] == 4
    assert bench.drafts(bench.plans[-1]).get("a", 0) <= 1


RAGGED = Costs(((4, 1.0), (8, 1.0), (9, 1.0), (10, 9.0)))


@pytest.mark.parametrize(("likely", "numbers"), [(70, (4, 0)), (85, (2, 2))])
def test_rows_with_fewer_than_others_cost_as_much(
    likely: int, numbers: tuple[int, int]
) -> None:
    """Three drafts and one, beside four inputs, are as long as three and three."""
    how = adaptive(HOST, RAGGED, learning=Learning(weight=1e-9))
    bench = begun(how, ask("a", 6, 30), ask("bb", 6, 30), guess=nothing, turns=2)
    some = {
        ("a", 0): Acceptance(100.0, 90.0),
        ("bb", 0): Acceptance(100.0, float(likely)),
    }
    step = bench.state.next_step - 1
    records = Map((name, SampleAcceptance(one, step)) for name, one in some.items())
    state = evolve(bench.state, drafting=Drafting(learnt=records))
    drafters = Drafters((0, 1), (4, 4))
    assert _numbers(how, state, drafters, 2, room=6, prompts=False) == numbers


def test_inputs_that_were_not_measured_get_no_drafts_beside_them() -> None:
    costs = Costs(((4, 1.0),))
    bench = begun(adaptive(DEVICE, costs), ask("a", 6, 50), ask("bb", 6, 50), turns=2)
    assert sum(bench.plans[-1].num_scheduled_tokens) == 4
    bench.turn(Submit(ask("ccc", 20, 3)))
    assert not bench.plans[-1].drafts, "a prompt is beside them"
    bench.drain()


@pytest.mark.parametrize(("beside", "drafted"), [(0.0, True), (9.0, False)])
def test_beside_prompts_drafts_may_cost_a_forward_more(
    beside: float, drafted: bool
) -> None:
    costs = Costs(((64, 1.0),), beside=beside)
    bench = begun(adaptive(DEVICE, costs), ask("a", 6, 50), ask("bb", 6, 50), turns=2)
    assert bench.plans[-1].drafts
    bench.turn(Submit(ask("ccc", 20, 3)))
    assert bench.plans[-1].fills
    assert bool(bench.plans[-1].drafts) == drafted
    bench.turn()
    assert not bench.plans[-1].fills
    assert bench.plans[-1].drafts
    bench.drain()


@pytest.mark.parametrize(("beside", "depth"), [(0.0, 1), (9.0, 2)])
def test_nor_does_a_sample_wait_for_them_then(beside: float, depth: int) -> None:
    """As for drafts beside a prompt's last chunk, which leaves room for some."""
    costs = Costs(((64, 1.0),), beside=beside)
    small = evolve(ROOMY, max_num_batched_tokens=12)
    bench = begun(adaptive(HOST, costs), ask("a", 6, 50), config=small, turns=2)
    bench.turn(Submit(ask("ccc", 25, 3)))
    bench.turn()
    assert bench.deep == depth
    bench.turn()
    assert bench.plans[-1].fills
    assert len(bench.plans[-1].drafts) == 2 - depth
    bench.drain()


def bare(config: EngineConfig = ROOMY) -> Drafted:
    return begun(HOSTED, ask("a", max_tokens=30), guess=nothing, config=config, turns=2)


def test_with_nothing_in_flight_nothing_waits() -> None:
    bench = bare()
    known = bench.state.running.known[0]
    state = bench.give(Propose("a", 0, known, (1,))).state
    assert waits_for_results(bench.config, state)
    assert not waits_for_results(bench.config, evolve(state, inflight=()))
    device = evolve(bench.config, speculation=ON_DEVICE)
    assert not waits_for_results(device, state)
