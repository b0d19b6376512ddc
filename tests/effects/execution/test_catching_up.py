"""What is taken before rows draft, and what is kept count of."""

import numpy as np
import pytest
from attrs import evolve

from minfer.effects.execution.catching_up import CatchUp, Chunk, pack_chunks
from minfer.effects.execution.inputs import Inputs
from minfer.plan import Draft, Fill, Plan
from minfer.request import Request
from tests.core.executing import opened

PROMPT = tuple(range(10, 16))
FIRST = Plan(
    0,
    (7,),
    (3,),
    (0,),
    (6,),
    (1,),
    (Fill(0, PROMPT),),
    (opened(Request(id="x", prompt=PROMPT, max_tokens=99), (0,)),),
)
PLAIN = Plan(1, (7,), (3,), (6,), (1,), (1,))
DRAFTING = Plan(2, (7,), (3,), (7,), (4,), (4,), drafts=(Draft(0),))


def done(work: CatchUp, plan: Plan, *tokens: int) -> None:
    work.launched(plan)
    work.collected(plan, (tokens,))


@pytest.fixture
def work() -> CatchUp:
    made = CatchUp(100)
    done(made, FIRST, 20)
    return made


def test_who_drafts_at_once_lacks_nothing(work: CatchUp) -> None:
    assert work.chunks(DRAFTING) == []
    done(work, DRAFTING, 21, 22, 23, 24)
    assert work.chunks(DRAFTING) == []  # the last draft comes with the step


@pytest.mark.parametrize("steps", [2, 5])
def test_what_was_drawn_without_drafts_is_taken_once(work: CatchUp, steps: int) -> None:
    for step in range(steps):
        done(work, PLAIN, 21 + step)
    assert work.chunks(PLAIN) == []
    drawn = [20, *range(21, 21 + steps)]
    assert work.chunks(DRAFTING) == [Chunk(3, 6, drawn)]
    assert work.chunks(DRAFTING) == []


def test_a_step_with_a_prompt_brings_all_rows_along(work: CatchUp) -> None:
    done(work, PLAIN, 21)
    other = evolve(PLAIN, gens=(7, 8), rows=(3, 4), starts=(6, 0), counts=(1, 1))
    opens = (evolve(FIRST.opens[0], index=1),)
    mixed = evolve(other, most=(1, 1), fills=(Fill(1, (5,)),), opens=opens)
    work.launched(mixed)
    work.collected(mixed, ((22,), (9,)))
    done(work, PLAIN, 23)
    assert work.chunks(DRAFTING) == []


def test_rows_that_change_hands(work: CatchUp) -> None:
    for _ in range(4):
        work.launched(PLAIN)
    done(work, evolve(FIRST, gens=(8,)), 20)
    for token in (1, 2, 3, 4):  # of the one before
        work.collected(PLAIN, ((token,),))
    assert work.texts[3].tokens == [*PROMPT, 20]
    assert work.chunks(evolve(DRAFTING, gens=(8,))) == []


def test_no_more_than_there_is_room_for(work: CatchUp) -> None:
    work.budget = 3
    for step in range(6):
        done(work, PLAIN, 21 + step)
    assert work.chunks(DRAFTING) == [Chunk(3, 6, [20, 21, 22])]
    work.launched(DRAFTING)
    work.collected(DRAFTING, ((30,),))
    assert work.chunks(DRAFTING) == [Chunk(3, 9, [23, 24, 25])]
    work.forget()
    assert work.chunks(DRAFTING) == []
    work.launched(DRAFTING)  # of rows that nobody knows any more


def test_chunks_are_packed_as_history() -> None:
    kind, words = pack_chunks([Chunk(3, 6, [20, 21]), Chunk(1, 2, [5, 6, 7])])
    assert (kind.tokens, kind.chunks, kind.longest, kind.draws) == (5, 2, 3, 0)
    inputs = Inputs.of(words, kind)
    assert inputs.history is not None
    expected = [[20, 21, 5, 6, 7], [6, 7, 2, 3, 4], [3, 3, 1, 1, 1]]
    assert np.array_equal(inputs.history.tokens, expected)
    assert inputs.history.chunks.tolist() == [[3, 1], [6, 2], [2, 3], [0, 2]]
