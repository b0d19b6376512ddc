"""Who drafts, how many drafts, and what a step waits for."""

from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.beam import BeamSearch
from minfer.config import EngineConfig
from minfer.messages import Overruled, Pause, Propose, Submit
from minfer.pmap import Map
from minfer.policy import FirstCome, Load
from minfer.request import Request, SamplingParams
from minfer.speculate.drafting import Drafting, Learnt
from minfer.speculate.length import Costs, Learning, Lengths, Record
from minfer.speculate.plan_drafts import (
    Drafter,
    _numbers,
    _pays,
    may_draft,
    plan_drafts,
    waits_for_results,
)
from minfer.speculate.proposing import told_of_proposals
from minfer.speculate.settings import DEVICE, HOST, Speculation
from minfer.work import Work
from tests.core.speculate.drafted import (
    FLAT,
    HOSTED,
    ON_DEVICE,
    ROOMY,
    Drafted,
    begun,
    model_wrong,
    nothing,
    planned,
    right,
    wrong,
)
from tests.core.test_engine import ask

BOTH = pytest.mark.parametrize("how", [HOSTED, ON_DEVICE], ids=["host", "device"])
ALONE = evolve(ROOMY, depth=1)
GREEDY = SamplingParams(temperature=0)
SEARCH = ask("beams", n=2, beams=BeamSearch(), sampling=GREEDY, lockstep=True)
POOLED = ask("pool", 30, 0, pooling="last")
SILENT = ask("pool", 30, 0)


def who_drafted(bench: Drafted) -> set[str]:
    """All that ever had drafts: those whose rows yielded them are remembered."""
    names = {
        plan.gens[one.index]: one for plan in bench.plans for one in plan.drafts
    }.keys()
    opened = {
        plan.gens[one.index]: one.name[0] for plan in bench.plans for one in plan.opens
    }
    return {opened[gen] for gen in names}


# --- who ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (ask("a"), True),
        (ask("a", lockstep=True), False),
        (SEARCH, False),
        (evolve(SEARCH, lockstep=False), False),
        (POOLED, False),
        (SILENT, False),
    ],
)
def test_for_whom_drafts_can_be_made(request_: Request, may: bool) -> None:
    assert may_draft(request_) is may


@BOTH
def test_who_is_bound_to_the_host_or_searches_has_none(how: Speculation) -> None:
    bound = ask("bound", 8, lockstep=True)
    bench = begun(how, ask("free", 7), bound, SEARCH, POOLED)
    bench.drain()
    assert who_drafted(bench) == {"free"}
    for wish in (ask("free", 7), bound):
        assert bench.out[wish.id, 0] == bench.right(wish)


@BOTH
def test_who_is_being_filled_has_none(how: Speculation) -> None:
    config = evolve(ALONE, max_num_batched_tokens=10)
    bench = begun(how, ask("a", 6, 30), ask("long", 40, 9), config=config)
    while any(start < 40 for start in bench.state.running.sched[1:]):
        assert "long" not in bench.drafts(bench.plans[-1])
        bench.turn()
    bench.drain()
    assert who_drafted(bench) == {"a", "long"}


def test_a_proposal_for_who_is_being_filled_comes_to_nothing() -> None:
    config = evolve(ALONE, max_num_batched_tokens=64)
    bench = begun(HOSTED, ask("a", 6, 30), guess=nothing, config=config, turns=2)
    bench.turn(Submit(ask("long", 90 - 40, 9)), Propose("long", 0, 50, (1, 2)))
    bench.turn(Propose("long", 0, 50, (1, 2)))
    assert not any(plan.drafts for plan in bench.plans)
    assert not waits_for_results(bench.config, bench.state)


@BOTH
def test_without_speculation_nobody_has_any(how: Speculation) -> None:
    bench = begun(how, ask("a", max_tokens=20), turns=5)
    work = Work(evolve(bench.config, speculation=None), bench.state)
    plan_drafts(work)
    assert not work.drafts
    assert not waits_for_results(work.config, work.state)


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_in_steps_of_more_rows_there_are_none(how: Speculation, rows: int) -> None:
    wishes = [ask("a" * n, 6, 20) for n in (1, 2)]
    bench = begun(evolve(how, rows=rows), *wishes, config=ALONE)
    bench.turn()
    bench.turn()
    assert bool(bench.plans[-1].drafts) == (rows != 1)
    bench.drain()


@BOTH
def test_rows_that_sit_out_do_not_count(how: Speculation) -> None:
    config = evolve(ALONE, late_masks=True)
    wishes = [ask("a", 6, 20), ask("bb", 6, 20, lockstep=True)]
    bench = begun(evolve(how, rows=1), *wishes, config=config, turns=1)
    assert not any(plan.drafts for plan in bench.plans)
    bench.turn(Pause("bb", 0))
    bench.turn()
    assert bench.drafts(bench.plans[-1])
    bench.turn(Pause("bb", 0, paused=False))
    bench.drain()


# --- how many -------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("most", [1, 3, 4])
def test_as_many_as_are_set(how: Speculation, most: int) -> None:
    bench = begun(evolve(how, drafts=most), ask("a", max_tokens=20), config=ALONE)
    bench.turn()
    plan = bench.plans[-1]
    assert bench.drafts(plan) == {"a": most}
    assert plan.counts == plan.most == (1 + most,)
    assert plan.repeat == 1
    (draft,) = plan.drafts
    said = bench.right(ask("a", max_tokens=20))[1 : 1 + most]
    assert draft.tokens == (said if how.drafter == HOST else ())


def test_no_more_than_the_host_says() -> None:
    bench = begun(HOSTED, ask("a", max_tokens=20), guess=lambda w, at: w[at : at + 2])
    while not bench.plans[-1].drafts:
        bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": 2}


@BOTH
@pytest.mark.parametrize("tokens", range(1, 9))
def test_never_beyond_the_last_token(how: Speculation, tokens: int) -> None:
    wish = ask("a", 6, tokens)
    bench = begun(how, wish, config=ALONE)
    bench.drain()
    assert bench.out["a", 0] == bench.right(wish)
    for plan in bench.plans:
        assert plan.starts[0] + plan.counts[0] <= 6 + tokens - 1
    drafts = sum(plan.counts[0] - 1 for plan in bench.plans if plan.drafts)
    assert (drafts > 0) == (tokens > 2), "of the last token alone there is no draft"


@BOTH
def test_a_prompt_gets_its_tokens_before_any_draft(how: Speculation) -> None:
    config = evolve(ALONE, max_num_batched_tokens=8)
    bench = begun(how, ask("a", 6, 40), config=config)
    bench.turn()
    bench.turn(Submit(ask("long", 20, 3)))
    some = [(plan.counts, len(plan.drafts)) for plan in bench.plans[-1:]]
    for _ in range(2):
        bench.turn()
        some.append((bench.plans[-1].counts, len(bench.plans[-1].drafts)))
    assert some == [((1, 7), 0), ((1, 7), 0), ((2, 6), 1)]


@BOTH
def test_drafts_share_what_is_left_of_the_budget(how: Speculation) -> None:
    config = evolve(ALONE, max_num_batched_tokens=9)
    wishes = [ask("a" * n, 3, 20) for n in (1, 2, 3)]
    bench = begun(how, *wishes, config=config)
    bench.turn()
    assert bench.plans[-1].counts == (5, 3, 1), "in order of rank"
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


@BOTH
def test_where_rows_take_all_of_the_budget_there_are_none(how: Speculation) -> None:
    config = evolve(ROOMY, max_num_batched_tokens=4)
    bench = begun(how, *[ask("a" * n, 3, 20) for n in range(1, 5)], config=config)
    while len(bench.plans[-1].gens) < 4 or bench.plans[-1].fills:
        bench.turn()
    for _ in range(3):
        bench.turn()
        assert bench.plans[-1].counts == (1, 1, 1, 1)
        assert bench.deep == 2, "and nothing waits for them"
    bench.drain()


@BOTH
@pytest.mark.parametrize(("blocks", "number"), [(3, 1), (4, 4)])
def test_blocks_are_taken_while_there_are_plenty(
    how: Speculation, blocks: int, number: int
) -> None:
    """Two for the prompt; one more for the drafts, if one is left for each row then."""
    config = evolve(ALONE, num_blocks=blocks, max_model_len=16)
    bench = begun(how, ask("a", 6, 6), config=config)
    before = bench.state.blocks.available
    bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": number}
    assert (before - bench.state.blocks.available) == (number == 4)
    bench.drain()


@BOTH
def test_where_the_table_ends_there_is_no_room(how: Speculation) -> None:
    """Of the other row, a block is free: its drafts are cut to nothing."""
    config = evolve(ALONE, num_blocks=6, block_size=4, max_model_len=12)
    wishes = [ask("a", 7, 5), ask("bb", 5, 5)]
    bench = begun(how, *wishes, config=config)
    bench.turn()
    plan = bench.plans[-1]
    tables = bench.state.running.tables
    ends = [len(table) * 4 for table in tables]
    for at, _ in enumerate(plan.gens):
        assert plan.starts[at] + plan.counts[at] <= ends[at]
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


def test_several_forwards_wait_for_a_step_without_drafts() -> None:
    config = evolve(ALONE, max_repeat=3)
    bench = begun(HOSTED, ask("a", 3, 30), config=config)
    bench.turn()
    assert (bench.plans[-1].repeat, bench.plans[-1].counts) == (1, (5,))
    bench.guess = nothing
    bench.turn()
    assert (bench.plans[-1].repeat, bench.plans[-1].most) == (3, (3,))
    bench.drain()
    assert bench.out["a", 0] == bench.right(ask("a", 3, 30))


# --- the policy -----------------------------------------------------------------------


@frozen
class Bounding(FirstCome):
    """Allows so many drafts, whatever that is."""

    answer: Any = 0

    def drafts(self, state: Any, load: Load, most: int) -> int:
        assert (state, most) == (None, 4)
        assert load.running
        if self.answer == "raise":
            raise ValueError
        answer: int = self.answer
        return answer


@BOTH
@pytest.mark.parametrize(("answer", "number"), [(0, 0), (2, 2), (4, 4), (99, 4), (-3, 0)])
def test_the_policy_bounds_them(how: Speculation, answer: int, number: int) -> None:
    config = evolve(ALONE, policy=Bounding(answer))
    bench = begun(how, ask("a", 3, 20), config=config)
    bench.turn()
    assert bench.drafts(bench.plans[-1]) == ({"a": number} if number else {})
    bench.drain()
    assert not bench.reasons_of(Overruled)


@BOTH
@pytest.mark.parametrize("answer", ["many", "raise", True, None, 2.0])
def test_what_is_no_answer_is_overruled(how: Speculation, answer: Any) -> None:
    config = evolve(ALONE, policy=Bounding(answer))
    bench = begun(how, ask("a", 3, 20), config=config)
    turn = bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": 4}
    (told,) = [one for one in turn.reasons if isinstance(one, Overruled)]
    assert told.question == "drafts"


@BOTH
def test_it_is_not_asked_where_nobody_may_have_any(how: Speculation) -> None:
    bench = begun(how, ask("a", 3, 2), config=evolve(ALONE, policy=Bounding("raise")))
    bench.turn(Propose("a", 0, 4, (1,)))
    bench.drain()
    assert not bench.reasons_of(Overruled)


def test_a_policy_that_allows_none_lets_nothing_wait() -> None:
    bench = begun(HOSTED, ask("a", 3, 20), config=evolve(ROOMY, policy=Bounding(0)))
    for _ in range(4):
        bench.turn()
        assert bench.deep == 2


# --- what waits -----------------------------------------------------------------------


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


def test_nobody_else_goes_on_meanwhile() -> None:
    """Who has no drafts of its own keeps the others' pace."""
    bench = begun(HOSTED, ask("a", 6, 30), ask("bb", 6, 30))
    bench.guess = lambda w, at: right(w, at) if w[:6] == ask("a").prompt else ()
    while not bench.plans[-1].drafts:
        bench.turn()
    assert bench.plans[-1].counts == (5, 1)
    assert not planned(bench.give())


def test_who_only_comes_waits_as_well() -> None:
    bench = begun(HOSTED, ask("a", 6, 30), turns=2)
    assert bench.plans[-1].drafts
    assert not planned(bench.give(Submit(ask("late"))))
    bench.turn()
    assert len(bench.plans[-1].gens) == 2


def test_stale_proposals_hold_up_nothing() -> None:
    bench = begun(HOSTED, ask("a", 6, 30), guess=nothing, turns=2)
    turn = bench.turn(Propose("a", 0, 3, (1,)), Propose("a", 0, 99, (1,)))
    assert len(planned(turn)) == 1
    assert bench.deep == 2


def test_proposals_that_nobody_may_have_hold_up_nothing() -> None:
    wish = ask("a", 6, 30, lockstep=True)
    config = evolve(ROOMY, late_masks=True)
    bench = begun(HOSTED, wish, ask("bb", 6, 30), guess=nothing, config=config, turns=2)
    bench.guess = lambda w, at: right(w, at) if w[:6] == wish.prompt else ()
    for _ in range(4):
        bench.turn()
        assert bench.deep == 2
        assert not bench.plans[-1].drafts


def test_while_a_prompt_takes_all_of_the_budget_nothing_waits() -> None:
    config = evolve(ROOMY, max_num_batched_tokens=8)
    bench = begun(HOSTED, ask("a", 6, 40), guess=nothing, config=config, turns=2)
    bench.guess = right
    bench.turn(Submit(ask("long", 40, 4)))
    while not bench.state.filling:
        bench.turn()
    seen = 0
    while bench.state.running.base[1] - bench.state.running.sched[1] > 8:
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
    left = run.base[1] - run.sched[1]
    assert left > 8
    told = [Propose("a", 0, run.known[0], (1,))]
    state = told_of_proposals(bench.config, bench.state, told).state
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


# --- as many as pay -------------------------------------------------------------------


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
    alone = begun(adaptive(HOST, costs), wishes[0], turns=2)
    assert alone.deep == 1


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


@pytest.mark.parametrize("drafter", [HOST, DEVICE])
def test_who_is_always_wrong_is_given_up_and_tried_again(drafter: str) -> None:
    learning = Learning(assumed=0.5, weight=2.0, rested=0.95, kept=1.0)
    costs = Costs(((1, 1.0), (5, 1.2)))
    config = evolve(ALONE, num_blocks=200, max_model_len=400)
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
    bench = begun(how, first, second, config=evolve(ALONE, max_num_batched_tokens=7))

    def guess(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
        return (right if whole[:6] == second.prompt else wrong)(whole, known)

    bench.guess = guess
    for _ in range(4):
        bench.turn()
    assert bench.drafts(bench.plans[-1])["bb"] == 4
    assert bench.drafts(bench.plans[-1]).get("a", 0) <= 1


RAGGED = Costs(((4, 1.0), (8, 1.0), (9, 1.0), (10, 9.0)))


@pytest.mark.parametrize(("likely", "numbers"), [(70, (0, 0)), (20, (4, 0))])
def test_rows_with_fewer_than_others_cost_as_much(
    likely: int, numbers: tuple[int, int]
) -> None:
    """Three drafts and one, beside four inputs, are as long as three and three."""
    how = adaptive(HOST, RAGGED, learning=Learning(weight=1e-9))
    bench = begun(how, ask("a", 6, 30), ask("bb", 6, 30), guess=nothing, turns=2)
    some = {("a", 0): Record(100.0, 90.0), ("bb", 0): Record(100.0, float(likely))}
    step = bench.state.next_step - 1
    records = Map({name: Learnt(one, step) for name, one in some.items()})
    state = evolve(bench.state, drafting=Drafting(learnt=records))
    drafters = [Drafter(0, 4), Drafter(1, 4)]
    assert _numbers(how, state, drafters, 2, room=4) == numbers


def test_what_drafts_cost_is_outweighed_and_not_only_met() -> None:
    how = adaptive(HOST, Costs(((2, 1.0), (5, 1.0), (6, 1.5))))
    for tokens, pays in ((2.9, False), (3.0, False), (3.1, True)):
        assert _pays(how, Lengths((2, 1), tokens, 1.0), 2) is pays
    dear = evolve(how, margin=0.1)
    assert not _pays(dear, Lengths((2, 1), 3.1, 1.0), 2)
    assert _pays(dear, Lengths((2, 0), 2.3, 1.0), 2), "alone it is not longer"
    assert not _pays(how, Lengths((0, 0), 9.0, 1.0), 2)
    assert not _pays(evolve(HOSTED), Lengths((2, 1), 9.0, 1.0), 2)


def test_inputs_that_were_not_measured_get_no_drafts_beside_them() -> None:
    costs = Costs(((4, 1.0),))
    bench = begun(adaptive(DEVICE, costs), ask("a", 6, 50), ask("bb", 6, 50), turns=2)
    assert sum(bench.plans[-1].counts) == 4
    bench.turn(Submit(ask("ccc", 20, 3)))
    assert not bench.plans[-1].drafts, "a prompt is beside them"
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
