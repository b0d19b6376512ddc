"""Accepted drafts over proposed drafts, and no token after them is counted."""

from hypothesis import given
from hypothesis import strategies as st

from minfer.speculate.tally import NO_DRAFTS, DraftTally, of_row

# Of each row, how many drafts, and how many of them were accepted.
ROWS = st.lists(
    st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    max_size=6,
)


def step_of(rows: list[tuple[int, int]]) -> DraftTally:
    """A step with rows of so many drafts, of which so many are accepted."""
    tally = NO_DRAFTS
    for proposed, accepted in rows:
        tally = tally.plus(of_row(proposed, accepted)) if proposed else tally
    return tally


def test_by_example() -> None:
    tally = step_of([(3, 3), (3, 1), (0, 0), (1, 0)])
    assert tally == DraftTally(3, (3, 2, 2), (2, 1, 1))
    assert tally.rate == 4 / 7, "the three tokens after them are no drafts"
    assert tally.by_place == (2 / 3, 1 / 2, 1 / 2)
    assert tally.mean_length == 7 / 3


def test_a_single_draft_is_the_whole_rate() -> None:
    assert (of_row(1, 1).rate, of_row(1, 0).rate) == (1.0, 0.0)


def test_nothing_is_no_rate() -> None:
    assert step_of([(0, 0)]) == DraftTally()
    assert (DraftTally().rate, DraftTally().by_place, DraftTally().mean_length) == (
        0.0,
        (),
        0.0,
    )


@given(ROWS, ROWS)
def test_steps_add_up(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    both = step_of(one).plus(step_of(other))
    assert both == step_of(one + other) == step_of(other).plus(step_of(one))
    assert sum(both.proposed) == sum(n for n, _ in one + other)
    assert sum(both.accepted) == sum(right for _, right in one + other)
    falls = list(both.accepted)
    assert falls == sorted(falls, reverse=True), "who has the second had the first"
    assert 0 <= both.rate <= 1
