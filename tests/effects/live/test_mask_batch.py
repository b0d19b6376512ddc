"""Who of a step is at its end, and draws what it likes."""

import numpy as np

from minfer.effects.live.mask_batch import STUCK, Batch
from minfer.effects.live.walks import Walk
from minfer.effects.text.grammars.protocol import GrammarError, Move
from minfer.messages import Finish
from minfer.plan import Draft, Mask, Plan, Stand
from tests.effects.live.walkers import EOS, Walker, ask


def test_those_who_cannot_go_on_end_by_name_and_those_without_a_token_simply() -> None:
    batch = Batch(free=[1])
    for line, name in ((0, "a"), (2, "b"), (3, "c"), (4, "d")):
        batch.walks[line] = Walk((name, 0), ask(name))
        batch.lengths[line] = 10 + line
    batch.errors = {2: GrammarError("no way"), 3: GrammarError("too slow")}
    assert batch.end({3, 4}) == (
        Finish("b", 0, 12, "error", f"{STUCK}: no way"),
        Finish("c", 0, 13, "error", f"{STUCK}: too slow"),
        Finish("d", 0, 14),
    )
    assert batch.free == [1, 2, 3, 4]


def test_of_whom_there_is_a_mask_nothing_ends() -> None:
    batch = Batch(walks={0: Walk(("a", 0), ask("a"))}, lengths={0: 3})
    assert batch.end(()) == ()
    assert not batch.free


# --- behind drafts ----------------------------------------------------------------------

PLAN = Plan(
    step=1,
    gens=(0, 1, 2, 3),
    rows=(0, 1, 2, 3),
    starts=(9, 9, 9, 9),
    counts=(4, 1, 3, 2),
    most=(4, 1, 3, 2),
    drafts=(Draft(0, (5, 6, 7)), Draft(2, (8, 9)), Draft(3, (5,))),
    apart=(0, 1, 2),
)


def drafting() -> Batch:
    """Two rows with drafts, of whom the second may draw any token."""
    batch = Batch.of(PLAN)
    batch.walks = {line: Walk((str(line), 0), ask(str(line))) for line in (0, 1)}
    batch.lengths = {0: 4, 1: 7}
    # All that is asked here.
    batch.moves = [Move(Walker(), 0, (), line) for line in (0, 1)]  # type: ignore[arg-type]
    batch.free = [2]
    batch.ask_behind()
    return batch


def test_masks_behind_drafts_have_lines_behind_all_others() -> None:
    batch = drafting()
    assert batch.count == 8
    assert [(one.drafts, one.behind) for one in batch.moves] == [((5, 6, 7), 3), ((), 0)]
    assert Batch.of(Plan(1, (0,), (0,), (3,), (1,), (1,), apart=(0,))).count == 1


def test_drafts_stand_as_far_as_there_are_masks() -> None:
    for reached, empty, stands in (
        (3, (), ()),
        (2, (), (Stand(0, 2),)),
        (3, (5,), (Stand(0, 2),)),
        (3, (3, 4), (Stand(0, 0),)),
        (0, (), (Stand(0, 0),)),
    ):
        batch = drafting()
        batch.moves[0].reached = reached
        batch.heard_behind()
        assert batch.stands(empty) == stands
        assert batch.free == [2, 6, 7], "and what is behind"
        masks = [*batch.masks(PLAN, np.arange(8, dtype=np.int32)[:, None])]
        most = stands[0].most if stands else 3
        bits = {line: np.int32(line).tobytes() for line in range(8)}
        behind = [Mask(0, bits[2 + place], place) for place in range(1, most + 1)]
        assert masks == [Mask(0, bits[0]), Mask(1, bits[1]), *behind]


def test_masks_of_a_thread_go_no_further_than_its_own() -> None:
    batch = drafting()
    batch.moves, batch.made = batch.moves[1:], [0]
    batch.heard_behind()
    assert batch.stands(()) == (Stand(0, 0),)


def test_ends_are_barred_behind_drafts_while_the_output_is_too_short() -> None:
    batch = drafting()
    batch.walks[0].min_tokens, batch.walks[0].never = 6, frozenset({2})
    batch.moves[0].reached = 3
    batch.heard_behind()
    short = frozenset({2, EOS})
    assert dict(batch.barred) == {short: [3], frozenset({2}): [4, 5]}
