"""What is taken before rows draft, and what is kept count of."""

import numpy as np
import pytest
from attrs import evolve

from minfer.effects.execution.packing.catching_up import (
    CatchUp,
    Chunk,
    pack_chunks,
    parted,
)
from minfer.effects.execution.packing.inputs import Inputs
from minfer.records.plan import Draft, Fill, Grow, Plan
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
    (Fill(0, PROMPT),),
    (opened(Request(id="x", prompt=PROMPT, max_tokens=99), (30, 31)),),
)
PLAIN = Plan(1, (7,), (3,), (6,), (1,), (1,))
DRAFTING = Plan(2, (7,), (3,), (7,), (4,), (4,), drafts=(Draft(0),))
ALL = Chunk(3, 0, [*PROMPT, 20])  # that the first step leaves to be taken


def chunks(work: CatchUp, plan: Plan) -> list[Chunk]:
    """What comes before a plan."""
    work.handed_over(plan)
    return work.chunks(plan)


def launched(work: CatchUp, plan: Plan) -> None:
    work.handed_over(plan)
    work.chunks(plan)
    work.launched(plan)


def done(work: CatchUp, plan: Plan, *tokens: int) -> None:
    launched(work, plan)
    work.collected(plan, (tokens,))


@pytest.fixture
def work() -> CatchUp:
    made = CatchUp(100, SIZE)
    done(made, FIRST, 20)
    return made


def test_a_prompt_is_taken_once_somebody_drafts(work: CatchUp) -> None:
    assert chunks(work, DRAFTING) == [ALL]
    work.launched(DRAFTING)
    work.collected(DRAFTING, ((21, 22, 23, 24),))
    assert chunks(work, DRAFTING) == []  # the last draft comes with the step


def test_a_prompt_is_taken_although_its_first_token_is_not_known_yet() -> None:
    work = CatchUp(100, SIZE)
    launched(work, FIRST)
    assert chunks(work, DRAFTING) == [Chunk(3, 0, [*PROMPT])]
    work.launched(DRAFTING)
    work.collected(FIRST, ((20,),))
    work.collected(DRAFTING, ((21, 22),))
    assert chunks(work, DRAFTING) == []


@pytest.mark.parametrize("steps", [2, 5])
def test_what_was_drawn_without_drafts_is_taken_once(work: CatchUp, steps: int) -> None:
    done(work, DRAFTING)
    for step in range(steps):
        done(work, PLAIN, 21 + step)
    assert chunks(work, PLAIN) == []
    drawn = [*range(21, 21 + steps)]
    assert chunks(work, DRAFTING) == [Chunk(3, 7, drawn)]
    assert chunks(work, DRAFTING) == []


def beside(plan: Plan) -> Plan:
    """The plan, in which another row takes a prompt of one token."""
    other = evolve(plan, gens=(7, 8), rows=(3, 4), starts=(*plan.starts, 0))
    both = evolve(other, counts=(*plan.counts, 1), most=(*plan.most, 1))
    opens = (evolve(FIRST.opens[0], index=1, known=(5,), tables=((40,),)),)
    return evolve(both, fills=(Fill(1, (5,)),), opens=opens)


def test_a_step_with_drafts_brings_along_all_who_lack_little(work: CatchUp) -> None:
    done(work, DRAFTING)  # of which one token came
    launched(work, beside(PLAIN))
    work.collected(beside(PLAIN), ((22,), (9,)))
    two = evolve(beside(DRAFTING), fills=(), opens=(), counts=(4, 1), starts=(8, 1))
    assert chunks(work, two) == [Chunk(3, 7, [22])]
    work.launched(two)
    assert work.texts[4].lacks == 0


def test_rows_that_change_hands(work: CatchUp) -> None:
    for _ in range(4):
        launched(work, PLAIN)
    done(work, evolve(FIRST, gens=(8,)), 20)
    for token in (1, 2, 3, 4):  # of the one before
        work.collected(PLAIN, ((token,),))
    assert work.texts[3].tokens == [*PROMPT, 20]
    assert chunks(work, evolve(DRAFTING, gens=(8,))) == [ALL]


def sharing(blocks: tuple[int, ...], start: int) -> Plan:
    """The first step of another row, whose prompt is computed up to `start`."""
    opens = (evolve(FIRST.opens[0], tables=(blocks,)),)
    changed = evolve(FIRST, gens=(9,), rows=(5,), starts=(start,), opens=opens)
    return evolve(changed, counts=(6 - start,), fills=(Fill(0, PROMPT[start:]),))


@pytest.mark.parametrize("drafted", [False, True])
def test_a_shared_prefix_is_taken_if_nobody_drafted_behind_it(
    work: CatchUp, drafted: bool
) -> None:
    if drafted:
        done(work, DRAFTING, 21)
    launched(work, sharing((30, 50), 5))
    theirs = evolve(DRAFTING, gens=(9,), rows=(5,))
    begin = SIZE if drafted else 0
    assert chunks(work, theirs) == [Chunk(5, begin, [*PROMPT[begin:]])]


def test_a_block_that_changes_hands_is_not_what_it_was(work: CatchUp) -> None:
    done(work, DRAFTING, 21)
    assert work.whole == {30}
    work.handed_over(evolve(PLAIN, grows=(Grow(3, 2, (32,)),)))
    for token in range(6):
        done(work, PLAIN, 22 + token)
    done(work, DRAFTING, 28)
    assert work.whole == {30, 31, 32}
    launched(work, evolve(PLAIN, grows=(Grow(6, 0, (31,)),)))
    assert work.whole == {30, 32}
    launched(work, sharing((30, 31), 0))
    assert work.whole == {32}


def test_nothing_is_known_after_a_failure(work: CatchUp) -> None:
    done(work, DRAFTING, 21)
    work.forget()
    assert chunks(work, DRAFTING) == []
    work.launched(DRAFTING)  # of rows that nobody knows any more
    assert work.whole == set()


def test_a_forward_takes_no_more_than_its_budget() -> None:
    some = [Chunk(1, 4, [1, 2]), Chunk(2, 0, [*range(10, 15)]), Chunk(3, 7, [8])]
    assert [*parted(some, 3)] == [
        [Chunk(1, 4, [1, 2]), Chunk(2, 0, [10])],
        [Chunk(2, 1, [11, 12, 13])],
        [Chunk(2, 4, [14]), Chunk(3, 7, [8])],
    ]
    assert [*parted(some, 100)] == [some]
    assert [*parted([], 3)] == []


def test_chunks_are_packed_as_history() -> None:
    kind, words = pack_chunks([Chunk(3, 6, [20, 21]), Chunk(1, 2, [5, 6, 7])])
    assert (kind.tokens, kind.chunks, kind.longest, kind.draws) == (5, 2, 3, 0)
    inputs = Inputs.of(words, kind)
    assert inputs.history is not None
    expected = [[20, 21, 5, 6, 7], [6, 7, 2, 3, 4], [3, 3, 1, 1, 1]]
    assert np.array_equal(inputs.history.tokens, expected)
    assert inputs.history.chunks.tolist() == [[3, 1], [6, 2], [2, 3], [0, 2]]
