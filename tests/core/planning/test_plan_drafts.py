"""Who drafts, how many drafts, and what a step waits for."""

from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.planning.plan_drafts import (
    _fitting,
    _proposed_for,
    _to_be_filled,
    may_draft,
    plan_drafts,
    waits_for_results,
)
from minfer.planning.step_builder import StepBuilder
from minfer.records.acceptance import Costs
from minfer.records.drafting import Proposed
from minfer.records.messages import Pause, PolicyOverride, Propose, Submit
from minfer.records.policy import FirstCome, Load
from minfer.records.request import PromptOnly, Request, SamplingParams
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, DRAFTERS, HOST, Speculation
from minfer.values.pmap import Map
from tests.core.speculate.drafted import (
    BOTH,
    HOSTED,
    ON_DEVICE,
    ROOMY,
    SOLO,
    Drafted,
    begun,
    model_wrong,
    nothing,
    right,
)
from tests.core.test_engine import CONFIG, Bench, ask

GREEDY = SamplingParams(temperature=0)
POOLED = ask("pool", 30, 0, prompt_only=PromptOnly("last"))
SILENT = ask("pool", 30, 0)


def who_drafted(bench: Drafted) -> set[str]:
    """All that ever had drafts: those whose rows yielded them are remembered."""
    names = {
        plan.run_ids[one.index]: one for plan in bench.plans for one in plan.drafts
    }.keys()
    opened = {
        plan.run_ids[one.index]: one.name[0] for plan in bench.plans for one in plan.opens
    }
    return {opened[gen] for gen in names}


# --- who ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (ask("a"), {HOST, DEVICE}),
        (ask("a", needs_host_mask=True), {HOST}),
        (POOLED, set()),
        (SILENT, set()),
    ],
)
def test_for_whom_drafts_can_be_made(request_: Request, may: set[str]) -> None:
    assert {who for who in DRAFTERS if may_draft(request_, who)} == may


@BOTH
def test_only_the_host_drafts_for_who_is_bound_to_it(how: Speculation) -> None:
    bound = ask("bound", 8, needs_host_mask=True)
    bench = begun(how, ask("free", 7), bound, POOLED)
    bench.drain()
    assert who_drafted(bench) == {"free"} | ({"bound"} if how is HOSTED else set())
    for wish in (ask("free", 7), bound):
        assert bench.out[wish.id, 0] == bench.right(wish)


@pytest.mark.parametrize("late", [False, True])
def test_rows_with_drafts_that_are_bound_to_the_host_have_deferred_sampling(
    late: bool,
) -> None:
    bound = ask("bound", 8, 30, needs_host_mask=True)
    config = evolve(ROOMY, late_masks=late)
    bench = begun(HOSTED, ask("free", 7, 30), bound, config=config, turns=3)
    plan = bench.plans[-1]
    at = {bench.state.running.ids[i][0]: i for i in range(2)}
    assert bench.drafts(plan).keys() == {"free", "bound"}
    assert plan.deferred == (at["bound"],)
    assert plan.max_sampled_tokens == plan.num_scheduled_tokens
    bench.drain()
    assert bench.out["bound", 0] == bench.right(bound)


@pytest.mark.long
def test_no_row_waits_for_drafts_of_a_row_that_waits_for_its_mask() -> None:
    bound = ask("bound", 8, 30, needs_host_mask=True)
    config = evolve(ROOMY, late_masks=True)
    bench = begun(HOSTED, ask("free", 7, 30), bound, guess=nothing, config=config)
    bench.turn()
    bench.guess = lambda w, at: right(w, at) if w[:8] == bound.prompt else ()
    bench.turn(Pause("bound", 0))
    for _ in range(3):
        bench.turn()
        assert bench.deep == 2
        assert not bench.plans[-1].drafts
    bench.turn(Pause("bound", 0, paused=False))
    while not bench.plans[-1].drafts:
        bench.turn()
    bench.drain()
    assert bench.out["bound", 0] == bench.right(bound)


def test_proposals_for_who_is_paused_are_for_nobody() -> None:
    bench = Bench(evolve(CONFIG, speculation=HOSTED))
    bench.give(Submit(ask("a")), Submit(ask("bb")))
    run, drafting = bench.state.running, bench.state.drafting
    said = dict.fromkeys(run.ids, Proposed(run.known[0], (1, 2)))
    proposals: Map[SampleId, Proposed] = Map(said)
    state = evolve(bench.state, drafting=evolve(drafting, proposals=proposals))
    assert (*_proposed_for(HOSTED, state).at,) == (0, 1)
    paused = evolve(state, paused=frozenset(run.ids[:1]))
    assert (*_proposed_for(HOSTED, paused).at,) == (1,)


@BOTH
def test_who_is_being_filled_has_none(how: Speculation) -> None:
    config = evolve(SOLO, max_num_batched_tokens=10)
    bench = begun(how, ask("a", 6, 30), ask("long", 40, 9), config=config)
    while any(start < 40 for start in bench.state.running.scheduled[1:]):
        assert "long" not in bench.drafts(bench.plans[-1])
        bench.turn()
    bench.drain()
    assert who_drafted(bench) == {"a", "long"}


def test_a_proposal_for_who_is_being_filled_comes_to_nothing() -> None:
    config = evolve(SOLO, max_num_batched_tokens=64)
    bench = begun(HOSTED, ask("a", 6, 30), guess=nothing, config=config, turns=2)
    bench.turn(Submit(ask("long", 90 - 40, 9)), Propose("long", 0, 50, (1, 2)))
    bench.turn(Propose("long", 0, 50, (1, 2)))
    assert not any(plan.drafts for plan in bench.plans)
    assert not waits_for_results(bench.config, bench.state)


@BOTH
def test_inputs_of_prompts_are_counted_once(how: Speculation) -> None:
    """Of larger steps than were measured nothing is known: this one is just as large."""
    how = evolve(how, adaptive=True, costs=Costs(((1 + 4 + 7, 1.0),)))
    bench = begun(how, ask("a", 6, 30), config=SOLO, turns=2)
    bench.turn(Submit(ask("b", 7, 9, root=b"another")))
    plan = bench.plans[-1]
    assert [len(fill.tokens) for fill in plan.fills] == [7]
    assert bench.drafts(plan) == {"a": 4}


@BOTH
def test_without_speculation_no_row_has_drafts(how: Speculation) -> None:
    bench = begun(how, ask("a", max_tokens=20), turns=5)
    work = StepBuilder(evolve(bench.config, speculation=None), bench.state)
    plan_drafts(work)
    assert not work.drafts
    assert not waits_for_results(work.config, work.state)


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_in_steps_of_more_rows_there_are_none(how: Speculation, rows: int) -> None:
    wishes = [ask("a" * n, 6, 20) for n in (1, 2)]
    bench = begun(evolve(how, rows=rows), *wishes, config=SOLO)
    bench.turn()
    bench.turn()
    assert bool(bench.plans[-1].drafts) == (rows != 1)
    bench.drain()


@BOTH
def test_rows_that_sit_out_do_not_count(how: Speculation) -> None:
    config = evolve(SOLO, late_masks=True)
    wishes = [ask("a", 6, 20), ask("bb", 6, 20, needs_host_mask=True)]
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
    bench = begun(evolve(how, drafts=most), ask("a", max_tokens=20), config=SOLO)
    bench.turn()
    plan = bench.plans[-1]
    assert bench.drafts(plan) == {"a": most}
    assert plan.num_scheduled_tokens == plan.max_sampled_tokens == (1 + most,)
    (draft,) = plan.drafts
    emitted = bench.right(ask("a", max_tokens=20))[1 : 1 + most]
    assert draft.tokens == (emitted if how.drafter == HOST else ())


def test_no_more_than_the_host_says() -> None:
    bench = begun(HOSTED, ask("a", max_tokens=20), guess=lambda w, at: w[at : at + 2])
    while not bench.plans[-1].drafts:
        bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": 2}


@BOTH
@pytest.mark.parametrize("tokens", range(1, 9))
def test_never_beyond_the_last_token(how: Speculation, tokens: int) -> None:
    wish = ask("a", 6, tokens)
    bench = begun(how, wish, config=SOLO)
    bench.drain()
    assert bench.out["a", 0] == bench.right(wish)
    for plan in bench.plans:
        assert plan.starts[0] + plan.num_scheduled_tokens[0] <= 6 + tokens - 1
    drafts = sum(plan.num_scheduled_tokens[0] - 1 for plan in bench.plans if plan.drafts)
    assert (drafts > 0) == (tokens > 2), "of the last token alone there is no draft"


@BOTH
def test_a_prompt_gets_its_tokens_before_any_draft(how: Speculation) -> None:
    config = evolve(SOLO, max_num_batched_tokens=8)
    bench = begun(how, ask("a", 6, 40), config=config)
    bench.turn()
    bench.turn(Submit(ask("long", 20, 3)))
    some = [(plan.num_scheduled_tokens, len(plan.drafts)) for plan in bench.plans[-1:]]
    for _ in range(2):
        bench.turn()
        some.append((bench.plans[-1].num_scheduled_tokens, len(bench.plans[-1].drafts)))
    assert some == [((1, 7), 0), ((1, 7), 0), ((2, 6), 1)]


# Of a budget, what three rows have that want four drafts each.
SHARED = {
    4: (2, 1, 1),
    7: (5, 1, 1),
    8: (3, 2, 1),  # four and one would take as much room as eight
    9: (4, 3, 1),
    11: (5, 5, 1),
    12: (4, 4, 2),
    14: (4, 4, 4),
    15: (5, 5, 5),
}


@BOTH
@pytest.mark.parametrize("budget", SHARED)
def test_drafts_share_what_is_left_of_the_budget(how: Speculation, budget: int) -> None:
    """In order of rank, but each row takes as much of it as the deepest."""
    config = evolve(SOLO, max_num_batched_tokens=budget)
    wishes = [ask("a" * n, 3, 20) for n in (1, 2, 3)]
    bench = begun(how, *wishes, config=config)
    while bench.plans[-1].fills or len(bench.plans[-1].run_ids) < 3:
        bench.turn()
    assert bench.plans[-1].num_scheduled_tokens == SHARED[budget]
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


@BOTH
def test_where_rows_take_all_of_the_budget_there_are_none(how: Speculation) -> None:
    config = evolve(ROOMY, max_num_batched_tokens=4)
    bench = begun(how, *[ask("a" * n, 3, 20) for n in range(1, 5)], config=config)
    while len(bench.plans[-1].run_ids) < 4 or bench.plans[-1].fills:
        bench.turn()
    for _ in range(3):
        bench.turn()
        assert bench.plans[-1].num_scheduled_tokens == (1, 1, 1, 1)
        assert bench.deep == 2, "and nothing waits for them"
    bench.drain()


@BOTH
@pytest.mark.parametrize(("blocks", "number"), [(3, 1), (4, 4)])
def test_blocks_are_taken_while_there_are_plenty(
    how: Speculation, blocks: int, number: int
) -> None:
    """Two for the prompt; one more for the drafts, if one is left for each row then."""
    config = evolve(SOLO, num_blocks=blocks, max_model_len=16)
    bench = begun(how, ask("a", 6, 6), config=config)
    before = bench.state.blocks.available
    bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": number}
    assert (before - bench.state.blocks.available) == (number == 4)
    bench.drain()


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_a_table_that_grows_anyway_grows_for_drafts_too(
    how: Speculation, size: int
) -> None:
    config = evolve(SOLO, block_size=size, num_blocks=200)
    wish = ask("a", 6, 41)
    with model_wrong(10**9):
        bench = begun(how, wish, config=config)
        bench.drain()
    assert [plan.num_scheduled_tokens for plan in bench.plans[1:]] == [(5,)] * 8
    assert bench.out["a", 0] == bench.right(wish)


@BOTH
def test_where_the_table_ends_there_is_no_room(how: Speculation) -> None:
    """Of the other row, a block is free: its drafts are cut to nothing."""
    config = evolve(SOLO, num_blocks=6, block_size=4, max_model_len=12)
    wishes = [ask("a", 7, 5), ask("bb", 5, 5)]
    bench = begun(how, *wishes, config=config)
    bench.turn()
    plan = bench.plans[-1]
    tables = bench.state.running.tables
    ends = [len(table) * 4 for (table,) in tables]
    for at, _ in enumerate(plan.run_ids):
        assert plan.starts[at] + plan.num_scheduled_tokens[at] <= ends[at]
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


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
    config = evolve(SOLO, policy=Bounding(answer))
    bench = begun(how, ask("a", 3, 20), config=config)
    bench.turn()
    assert bench.drafts(bench.plans[-1]) == ({"a": number} if number else {})
    bench.drain()
    assert not bench.reasons_of(PolicyOverride)


@BOTH
def test_what_is_no_answer_is_overruled(how: Speculation) -> None:
    config = evolve(SOLO, policy=Bounding("many"))
    bench = begun(how, ask("a", 3, 20), config=config)
    turn = bench.turn()
    assert bench.drafts(bench.plans[-1]) == {"a": 4}
    (reported,) = [one for one in turn.reasons if isinstance(one, PolicyOverride)]
    assert reported.question == "drafts"


@BOTH
def test_it_is_not_consulted_where_no_row_may_have_drafts(how: Speculation) -> None:
    bench = begun(how, ask("a", 3, 2), config=evolve(SOLO, policy=Bounding("raise")))
    bench.turn(Propose("a", 0, 4, (1,)))
    bench.drain()
    assert not bench.reasons_of(PolicyOverride)


def test_it_is_not_consulted_where_rows_take_all_of_the_budget() -> None:
    config = evolve(
        ROOMY, max_num_batched_tokens=2, max_num_seqs=2, policy=Bounding("raise")
    )
    bench = begun(ON_DEVICE, ask("a", 1, 9), ask("b", 1, 9), config=config)
    while len(bench.plans[-1].run_ids) < 2:
        bench.turn()
    assert bench.plans[-1].num_scheduled_tokens == (1, 1)
    before = len(bench.reasons_of(PolicyOverride))
    bench.turn()
    assert len(bench.reasons_of(PolicyOverride)) == before


def test_a_policy_that_allows_none_lets_nothing_wait() -> None:
    bench = begun(HOSTED, ask("a", 3, 20), config=evolve(ROOMY, policy=Bounding(0)))
    for _ in range(4):
        bench.turn()
        assert bench.deep == 2


def test_where_there_is_less_than_no_room_no_drafts_fit() -> None:
    assert _fitting((2, 0), -3) == (0, 0)
    assert _fitting((2, 3), 4) == (2, 2)


def test_inputs_of_prompts_are_counted_besides_one_of_each_row() -> None:
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=4))
    bench.give(Submit(ask("a", 11, 9)))
    assert bench.state.filling
    assert bench.state.running.scheduled == (4,)
    assert _to_be_filled(bench.state) == 6
    assert _to_be_filled(evolve(bench.state, filling=False)) == 0
