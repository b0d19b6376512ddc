"""What is taken before rows draft, and what is kept count of."""

import numpy as np
import pytest
from attrs import evolve

from minfer.effects.execution.packing.catching_up import (
    CatchUp,
    MissingChunk,
    pack_chunks,
    split_by_budget,
)
from minfer.effects.execution.packing.inputs import ForwardWords
from minfer.records.plan import Draft, Grow, Plan, PrefillTokens
from minfer.records.request import Request
from tests.core.executing import opened

SIZE = 4  # of a block
PROMPT = tuple(range(10, 16))
FIRST = Plan(
    0,
    (7,),
    (3,),
    (0,),
    (6,),
    (1,),
    (PrefillTokens(0, PROMPT),),
    (opened(Request(id="x", prompt=PROMPT, max_tokens=99), (30, 31)),),
)
PLAIN = Plan(1, (7,), (3,), (6,), (1,), (1,))
DRAFTING = Plan(2, (7,), (3,), (7,), (4,), (4,), drafts=(Draft(0),))
ALL = MissingChunk(3, 0, [*PROMPT, 20])  # that the first step leaves to be taken


def chunks(work: CatchUp, plan: Plan) -> list[MissingChunk]:
    """What comes before a plan."""
    work.note_owners(plan)
    return work.missing_chunks(plan)


def launched(work: CatchUp, plan: Plan) -> None:
    work.note_owners(plan)
    work.missing_chunks(plan)
    work.note_launched(plan)


def done(work: CatchUp, plan: Plan, *tokens: int) -> None:
    launched(work, plan)
    work.note_results(plan, (tokens,))


@pytest.fixture
def work() -> CatchUp:
    catch_up = CatchUp(100, SIZE)
    done(catch_up, FIRST, 20)
    return catch_up


def test_a_prompt_is_taken_once_a_row_drafts(work: CatchUp) -> None:
    assert chunks(work, DRAFTING) == [ALL]
    work.note_launched(DRAFTING)
    work.note_results(DRAFTING, ((21, 22, 23, 24),))
    assert chunks(work, DRAFTING) == []  # the last draft comes with the step


def test_a_prompt_is_taken_although_its_first_token_is_not_known_yet() -> None:
    work = CatchUp(100, SIZE)
    launched(work, FIRST)
    assert chunks(work, DRAFTING) == [MissingChunk(3, 0, [*PROMPT])]
    work.note_launched(DRAFTING)
    work.note_results(FIRST, ((20,),))
    work.note_results(DRAFTING, ((21, 22),))
    assert chunks(work, DRAFTING) == []


@pytest.mark.parametrize("steps", [2, 5])
def test_what_was_drawn_without_drafts_is_taken_once(work: CatchUp, steps: int) -> None:
    done(work, DRAFTING)
    for step in range(steps):
        done(work, PLAIN, 21 + step)
    assert chunks(work, PLAIN) == []
    drawn = [*range(21, 21 + steps)]
    assert chunks(work, DRAFTING) == [MissingChunk(3, 7, drawn)]
    assert chunks(work, DRAFTING) == []


def beside(plan: Plan) -> Plan:
    """The plan, in which another row takes a prompt of one token."""
    other_plan = evolve(plan, run_ids=(7, 8), rows=(3, 4), starts=(*plan.starts, 0))
    both_plans = evolve(
        other_plan,
        num_scheduled_tokens=(*plan.num_scheduled_tokens, 1),
        max_sampled_tokens=(*plan.max_sampled_tokens, 1),
    )
    opens = (evolve(FIRST.opens[0], index=1, known=(5,), tables=((40,),)),)
    return evolve(both_plans, fills=(PrefillTokens(1, (5,)),), opens=opens)


def test_a_drafting_step_computes_rows_that_miss_little(work: CatchUp) -> None:
    done(work, DRAFTING)  # of which one token came
    launched(work, beside(PLAIN))
    work.note_results(beside(PLAIN), ((22,), (9,)))
    two = evolve(
        beside(DRAFTING), fills=(), opens=(), num_scheduled_tokens=(4, 1), starts=(8, 1)
    )
    assert chunks(work, two) == [MissingChunk(3, 7, [22])]
    work.note_launched(two)
    assert work.states[4].missing == 0


def test_rows_that_change_hands(work: CatchUp) -> None:
    for _ in range(4):
        launched(work, PLAIN)
    done(work, evolve(FIRST, run_ids=(8,)), 20)
    for token in (1, 2, 3, 4):  # of the one before
        work.note_results(PLAIN, ((token,),))
    assert work.states[3].tokens == [*PROMPT, 20]
    assert chunks(work, evolve(DRAFTING, run_ids=(8,))) == [ALL]


def sharing(blocks: tuple[int, ...], start: int) -> Plan:
    """The first step of another row, whose prompt is computed up to `start`."""
    opens = (evolve(FIRST.opens[0], tables=(blocks,)),)
    changed = evolve(FIRST, run_ids=(9,), rows=(5,), starts=(start,), opens=opens)
    return evolve(
        changed,
        num_scheduled_tokens=(6 - start,),
        fills=(PrefillTokens(0, PROMPT[start:]),),
    )


@pytest.mark.parametrize("drafted", [False, True])
def test_a_shared_prefix_without_drafts_is_computed(work: CatchUp, drafted: bool) -> None:
    if drafted:
        done(work, DRAFTING, 21)
    launched(work, sharing((30, 50), 5))
    other_row = evolve(DRAFTING, run_ids=(9,), rows=(5,))
    begin = SIZE if drafted else 0
    assert chunks(work, other_row) == [MissingChunk(5, begin, [*PROMPT[begin:]])]


def test_a_block_that_changes_hands_is_not_what_it_was(work: CatchUp) -> None:
    done(work, DRAFTING, 21)
    assert work.complete == {30}
    work.note_owners(evolve(PLAIN, grows=(Grow(3, 2, (32,)),)))
    for token in range(6):
        done(work, PLAIN, 22 + token)
    done(work, DRAFTING, 28)
    assert work.complete == {30, 31, 32}
    launched(work, evolve(PLAIN, grows=(Grow(6, 0, (31,)),)))
    assert work.complete == {30, 32}
    launched(work, sharing((30, 31), 0))
    assert work.complete == {32}


def test_nothing_is_known_after_a_failure(work: CatchUp) -> None:
    done(work, DRAFTING, 21)
    work.forget()
    assert chunks(work, DRAFTING) == []
    work.note_launched(DRAFTING)  # of rows that are unknown by now
    assert work.complete == set()


def test_a_forward_takes_no_more_than_its_budget() -> None:
    chunks = [
        MissingChunk(1, 4, [1, 2]),
        MissingChunk(2, 0, [*range(10, 15)]),
        MissingChunk(3, 7, [8]),
    ]
    assert [*split_by_budget(chunks, 3)] == [
        [MissingChunk(1, 4, [1, 2]), MissingChunk(2, 0, [10])],
        [MissingChunk(2, 1, [11, 12, 13])],
        [MissingChunk(2, 4, [14]), MissingChunk(3, 7, [8])],
    ]
    assert [*split_by_budget(chunks, 100)] == [chunks]
    assert [*split_by_budget([], 3)] == []


def test_chunks_are_packed_as_history() -> None:
    shape, words = pack_chunks(
        [MissingChunk(3, 6, [20, 21]), MissingChunk(1, 2, [5, 6, 7])]
    )
    assert (shape.tokens, shape.chunks, shape.longest, shape.draws) == (5, 2, 3, 0)
    inputs = ForwardWords.of(words, shape)
    assert inputs.prefill is not None
    expected = [[20, 21, 5, 6, 7], [6, 7, 2, 3, 4], [3, 3, 1, 1, 1]]
    assert np.array_equal(inputs.prefill.tokens, expected)
    assert inputs.prefill.chunks.tolist() == [[3, 1], [6, 2], [2, 3], [0, 2]]
