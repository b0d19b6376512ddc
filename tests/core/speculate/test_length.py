"""Lengths against brute force, and against rows whose drafts are accepted as they are."""

from itertools import product
from random import Random
from typing import Any, Final

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.records.acceptance import Acceptance, Costs, Learning, counted_drafts
from minfer.speculate import length
from minfer.speculate.length import ExpectedTokens, Lengths
from minfer.values.checks import ConfigError
from tests.circles import long

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Like a 7B on one GPU: 4.4 ms for its weights, then by the token; a draft of a 0.5B.
LARGE: Final = Costs(tuple((n, 4.4e-3 + 9e-6 * n + 2e-8 * n * n) for n in SIZES), 5e-4)
FOUND: Final = evolve(LARGE, draft=0.0, fixed=4e-4)
# As measured at start: a 7B with a 0.5B that drafts for it, on an H100.
H100: Final = Costs(
    ((1, 5.3e-3), (4, 5.96e-3), (64, 6.16e-3), (128, 6.41e-3)), draft=6.4e-4, fixed=1.2e-4
)


@frozen
class DraftRow:
    likelihood: float
    most: int


def lengths(rows: list[DraftRow], some: Costs, *others: Any, **more: Any) -> Lengths:
    columns = [row.likelihood for row in rows], [row.most for row in rows]
    return length.lengths(*columns, some, *others, **more)


ROWS = st.lists(st.builds(DraftRow, st.floats(0.05, 1), st.integers(0, 3)), max_size=4)
RISES = st.lists(st.floats(0, 0.5), min_size=1, max_size=8)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    rises, step = draw(RISES), draw(st.integers(1, 3))
    table = [(1 + at * step, 1 + sum(rises[: at + 1])) for at in range(len(rises))]
    more = ((1, 0.0), (2, 0.01), (4, 0.1)) if draw(st.booleans()) else ()
    draft, fixed = draw(st.sampled_from((0.0, 0.1))), draw(st.floats(0, 0.2))
    return Costs(tuple(table), draft, fixed, more)


def rate_of(
    rows: list[DraftRow], drafts: tuple[int, ...], some: Costs, others: int
) -> float:
    """Expected tokens a second."""
    each = zip(rows, drafts, strict=True)
    tokens = sum(sum(row.likelihood**k for k in range(n + 1)) for row, n in each)
    depth = max(drafts, default=0)
    some_rows = sum(map(bool, drafts))
    inputs = len(rows) + some_rows * depth + others
    return (tokens + others) / some.seconds(inputs, depth, some_rows)


@settings(deadline=None)
@given(ROWS, costs(), st.integers(0, 6))
def test_no_other_numbers_of_drafts_are_expected_to_yield_more(
    rows: list[DraftRow], some: Costs, others: int
) -> None:
    chosen = lengths(rows, some, others)
    all_ways = product(*(range(row.most + 1) for row in rows))
    best = max(rate_of(rows, drafts, some, others) for drafts in all_ways)
    assert chosen.rate == pytest.approx(best, rel=0.08), "0.01 tokens a draft are let go"
    assert chosen.rate == pytest.approx(rate_of(rows, chosen.drafts, some, others))
    likely = all(row.likelihood**row.most >= 0.01 for row in rows)
    assert not likely or chosen.rate == pytest.approx(best)


@given(ROWS, costs(), st.integers(0, 6), st.floats(0, 0.5))
def test_drafts_are_within_bounds_and_never_worse_than_none(
    rows: list[DraftRow], some: Costs, others: int, margin: float
) -> None:
    chosen = lengths(rows, some, others, margin)
    assert all(0 <= n <= row.most for n, row in zip(chosen.drafts, rows, strict=True))
    plain = rate_of(rows, (0,) * len(rows), some, others)
    drafts = any(chosen.drafts)
    assert chosen.rate > plain * (1 + margin) if drafts else chosen.rate == plain


def test_likely_rows_have_more_drafts() -> None:
    rows = [DraftRow(0.95, 6), DraftRow(0.3, 6), DraftRow(0.05, 6)]
    assert lengths(rows, Costs(((40, 1.0),))).drafts == (6, 3, 1)
    dear = Costs(tuple((n, 1 + n / 10) for n in range(1, 40)))
    one, *others = lengths(rows, dear).drafts
    assert one > 2
    assert others == [0, 0]


def test_each_row_takes_as_much_room_as_the_deepest() -> None:
    flat, rows = Costs(((64, 1.0),)), [DraftRow(0.9, 4), DraftRow(0.5, 1)]
    found = [lengths(rows, flat, room=room).drafts for room in (-1, 0, 1, 4, 7, 8)]
    assert found == [(0, 0), (0, 0), (1, 0), (4, 0), (4, 0), (4, 1)]
    many = lengths([DraftRow(0.9, 4), *[DraftRow(0.6, 4)] * 5], flat, room=8).drafts
    assert many == (2, 2, 2, 2, 0, 0), "four of the first would leave no room for others"


@settings(deadline=None)
@given(ROWS, costs(), st.integers(0, 6), st.integers(0, 12))
def test_drafts_have_room(
    rows: list[DraftRow], some: Costs, others: int, room: int
) -> None:
    drafts = lengths(rows, some, others, room=room).drafts
    assert sum(map(bool, drafts)) * max(drafts, default=0) <= room
    roomy = lengths(rows, some, others)
    deepest = max((row.most for row in rows), default=0)
    assert lengths(rows, some, others, room=len(rows) * deepest) == roomy


def test_a_busy_server_has_none() -> None:
    rows = [DraftRow(0.7, 6)]
    assert lengths(rows * 4, LARGE).drafts > (2,) * 4
    assert lengths(rows * 4, LARGE, other_inputs=500).drafts == (0,) * 4
    assert lengths(rows * 256, LARGE).drafts == (0,) * 256
    beyond = lengths(rows * 600, LARGE)
    assert beyond == Lengths((0,) * 600, 600.0, float("inf"))
    assert lengths([], LARGE).drafts == ()


def test_a_forward_is_filled_up_to_its_size() -> None:
    steps = Costs(((4, 1.0), (8, 1.5)))
    assert lengths([DraftRow(0.5, 6)], steps).drafts == (3,)
    assert lengths([DraftRow(0.5, 6)], steps, other_inputs=3).drafts == (0,), (
        "a half pays for no half"
    )
    assert lengths([DraftRow(0.9, 6)], steps, other_inputs=3).drafts == (4,)


def test_beside_prompts_they_may_cost_a_forward_more() -> None:
    some = Costs(((99, 1.0),), fixed=0.25, beside=2.0)
    assert lengths([DraftRow(0.9, 4)], some).drafts == (4,)
    assert lengths([DraftRow(0.9, 4)], some, 9, prompts=True).drafts == (0,)
    assert some.seconds(9, 2, prompts=True) == 3.25
    assert some.seconds(9, 0, prompts=True) == some.seconds(9) == 1.0


def test_what_hardly_promises_anything_is_left_out() -> None:
    assert lengths([DraftRow(0.05, 9)], Costs(((99, 1.0),))).drafts == (1,)
    assert lengths([DraftRow(0.01, 9)], Costs(((99, 1.0),))).drafts == (1,)
    assert lengths([DraftRow(0.0, 9)], Costs(((99, 1.0),))).drafts == (0,)


def test_rows_of_which_nothing_is_expected_cost_nothing() -> None:
    some = Costs(((99, 1.0),), draft_more=((1, 0.0), (2, 5.0)))
    assert lengths([DraftRow(0.9, 4), DraftRow(0.0, 4)], some).drafts == (4, 0)


def test_the_deepest_that_promises_anything_is_tried() -> None:
    some = Costs(((10, 1.0), (99, 50.0)))
    assert lengths([DraftRow(0.6, 36)], some).drafts == (9,), (
        "0.6**10 is below a hundredth"
    )


def test_the_likeliest_rows_are_those_of_the_depth() -> None:
    promises = ExpectedTokens([[0.5, 0.4], [0.5, 0.8], [1.5, 0.8]], [3, 2])
    assert [promises.likeliest(depth) for depth in (1, 2, 3)] == [[0, 1], [1, 0], [0, 1]]


def test_a_gain_below_the_margin_is_none() -> None:
    assert lengths([DraftRow(0.5, 1)], Costs(((1, 1.0), (2, 1.5)))).drafts == (0,)
    some = Costs(((1, 1.0), (2, 1.4)))
    assert lengths([DraftRow(0.5, 1)], some, margin=0.05).drafts == (1,)
    assert lengths([DraftRow(0.5, 1)], some, margin=0.1).drafts == (0,)


def test_what_a_row_leaves_empty_costs_as_much() -> None:
    """Beside one row of four drafts, others take part for nothing; a fifth input more
    does not pay.
    """
    some = Costs(((2, 1.0), (10, 1.1), (11, 9.0)))
    assert lengths([DraftRow(0.9, 4), DraftRow(0.5, 2)], some).drafts == (4, 2)
    some = Costs(((2, 1.0), (6, 1.1), (7, 9.0)))
    assert lengths([DraftRow(0.9, 4), DraftRow(0.5, 2)], some).drafts == (4, 0)
    assert lengths([DraftRow(0.9, 4), DraftRow(0.8, 2)], some).drafts == (2, 2)


@pytest.mark.parametrize("most", [9, 16, 33, 64])
def test_many_drafts_are_tried_by_doublings(most: int) -> None:
    (found,) = lengths([DraftRow(0.99, most)], Costs(((99, 1.0),))).drafts
    assert found == most
    for depth in (8, 16, 32):
        some = Costs(((depth + 1, 1.0), (99, 50.0)))
        assert lengths([DraftRow(0.99, most)], some).drafts == (min(most, depth),)


# --- learning ---------------------------------------------------------------------------


def test_drafts_behind_a_rejected_one_are_not_judged() -> None:
    assert [
        counted_drafts(5, 2),
        counted_drafts(5, 5),
        counted_drafts(1, 0),
        counted_drafts(0, 0),
    ] == [3, 5, 1, 0]


def test_counts_fade() -> None:
    how = Learning()
    assert Acceptance().updated(how, 3, 2) == Acceptance(3, 2)
    twice = Acceptance(3, 2).updated(how, 2, 1)
    assert twice == Acceptance(3 * how.kept + 2, 2 * how.kept + 1)


def test_no_more_is_remembered_than_most() -> None:
    how = Learning(most=10.0)
    record = Acceptance(10, 5).updated(how, 30, 30)
    assert record.judged == pytest.approx(10)
    assert record.accepted == pytest.approx(10 * 34.9 / 39.8)
    assert Acceptance().updated(how, 0, 0) == Acceptance()


def test_without_drafts_what_was_learnt_fades() -> None:
    how = Learning(weight=2.0, rested=0.9)
    record = Acceptance(100, 0)
    assert Acceptance().likelihood(how, 0.5) == 0.5
    low = record.likelihood(how, 0.5)
    for _ in range(100):
        record = record.updated(how, 0, 0)
    assert low < 0.02
    assert record.likelihood(how, 0.5) > 0.49


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_what_is_learnt_is_what_happens(share: float) -> None:
    rng, how, record = Random(1), Learning(weight=2.0, kept=0.99), Acceptance()
    for _ in range(500):
        right = accepted(rng, share, 4)
        record = record.updated(how, counted_drafts(4, right), right)
    assert record.likelihood(how, 0.5) == pytest.approx(share, abs=0.07)


def accepted(rng: Random, share: float, drafts: int) -> int:
    """Of so many drafts, each of which is accepted if those before it are."""
    return next((k for k in range(drafts) if rng.random() >= share), drafts)


@frozen
class Service:
    """Some rows for some steps: what became of them."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def served(
    shares: list[float], some: Costs, steps: int, fixed: int | None = None
) -> Service:
    """Rows whose drafts are accepted as `shares` say; with so many drafts, or as many as
    pay.
    """
    rng, how = Random(2), Learning()
    records, whole, tokens, seconds = [Acceptance()] * len(shares), Acceptance(), 0, 0.0
    for _ in range(steps):
        common = whole.likelihood(how, how.assumed)
        rows = [DraftRow(record.likelihood(how, common), 8) for record in records]
        drafts = (
            (fixed,) * len(shares) if fixed is not None else lengths(rows, some).drafts
        )
        depth = max(drafts)
        seconds += some.seconds(len(shares) + sum(map(bool, drafts)) * depth, depth)
        right = [accepted(rng, *each) for each in zip(shares, drafts, strict=True)]
        seen = [counted_drafts(*each) for each in zip(drafts, right, strict=True)]
        tokens += len(shares) + sum(right)
        records = [
            record.updated(how, *each)
            for record, *each in zip(records, seen, right, strict=True)
        ]
        whole = whole.updated(how, sum(seen), sum(right))
    return Service(tokens, seconds)


@pytest.mark.long
@pytest.mark.parametrize(
    ("some", "batch", "share"),
    [
        *(
            (some, batch, share)
            for some in (LARGE, FOUND)
            for batch in (1, 8)
            for share in (0.0, 0.3, 0.5, 0.7, 0.9)
        ),
        *long(
            (LARGE, batch, share) for batch in (32, 64, 200) for share in (0.0, 0.5, 0.9)
        ),
    ],
)
def test_never_slower_than_without_and_nearly_as_quick_as_can_be(
    some: Costs, batch: int, share: float
) -> None:
    steps = max(100, 1600 // batch)
    shares = [share] * batch
    learnt = served(shares, some, steps).rate
    assert learnt >= 0.97 * served(shares, some, steps, 0).rate
    every = [served(shares, some, steps, n).rate for n in range(9)]
    assert learnt >= 0.93 * max(every)


@pytest.mark.long
def test_bad_luck_at_the_beginning_is_not_taken_for_long() -> None:
    """Rows by themselves, one after the other, whose drafts pay: those whose first ones
    are rejected have some all the same. Of each 20, the worst but one.
    """
    how = Learning()
    drafted = sorted(
        share_with_drafts(Random(seed), how, 0.5, steps=160) for seed in range(100)
    )
    assert drafted[5] > 0.75


def share_with_drafts(rng: Random, how: Learning, share: float, steps: int) -> float:
    """Of a new row's steps, those that have drafts; others' were like its own before."""
    record, whole, tried = Acceptance(), Acceptance(20, 20 * share), 0
    for _ in range(steps):
        common = whole.likelihood(how, how.assumed)
        (drafts,) = lengths([DraftRow(record.likelihood(how, common), 8)], H100).drafts
        right = accepted(rng, share, drafts)
        record = record.updated(how, counted_drafts(drafts, right), right)
        whole = whole.updated(how, counted_drafts(drafts, right), right)
        tried += drafts > 0
    return tried / steps


@pytest.mark.long
def test_rows_that_differ_have_lengths_of_their_own() -> None:
    shares = [0.95] * 8 + [0.1] * 8
    learnt = served(shares, LARGE, 300).rate
    assert learnt > 1.04 * max(served(shares, LARGE, 300, n).rate for n in range(9))


@pytest.mark.long
def test_a_row_that_becomes_likely_is_found_out() -> None:
    rng, how, some = Random(3), Learning(), LARGE
    record, whole, tried = Acceptance(), Acceptance(), []
    for step in range(3000):
        common = whole.likelihood(how, how.assumed)
        (drafts,) = lengths([DraftRow(record.likelihood(how, common), 8)], some).drafts
        right = accepted(rng, 0.0 if step < 1500 else 0.95, drafts)
        record = record.updated(how, counted_drafts(drafts, right), right)
        whole = whole.updated(how, counted_drafts(drafts, right), right)
        tried.append(drafts)
    assert sum(map(bool, tried[500:1500])) < 100, "hopeless drafts are seldom tried"
    assert sum(tried[-500:]) > 500 * 4


# --- bad tables -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        (),
        ((0, 1.0),),
        ((1, 0.0),),
        ((1, 1.0), (1, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((1, 2.0), (2, 1.0)),
        ((1, float("inf")),),
    ],
)
def test_tables_that_cannot_be_are_refused(table: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="speculation: costs must"):
        Costs(table)
    if table[:1] != ((1, 0.0),):  # no longer than for one row
        with pytest.raises(ConfigError, match="speculation: costs must"):
            Costs(((1, 1.0),), draft_more=table or ((0, 1.0),))


def test_what_costs_are_of() -> None:
    some = Costs(((2, 1.0), (4, 2.0)), draft=0.25, fixed=0.5)
    assert [some.seconds(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, float("inf")]
    assert [some.seconds(2, depth) for depth in (1, 2)] == [1.75, 2.0]
    assert some.drafted(99) == some.draft
    wide = evolve(some, draft_more=((1, 0.0), (4, 0.5), (8, 1.0)))
    assert [wide.drafted(rows) for rows in (1, 2, 4, 5, 9)] == [
        0.25,
        0.75,
        0.75,
        1.25,
        1.25,
    ]
    assert wide.seconds(3, 2, 5) == 2.0 + 2 * 1.25 + 0.5
    assert wide.seconds(3, 0, 0) == 2.0
    assert Learning(kept=1.0, rested=1.0, assumed=1.0).most > 0


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculation: kept must be at most 1"):
        Learning(kept=1.5)
    for name in ("weight", "most"):
        with pytest.raises(ConfigError, match=f"speculation: {name} must be"):
            Learning(**{name: 0.0})
    with pytest.raises(ConfigError, match="speculation: draft must be"):
        Costs(((1, 1.0),), draft=-1.0)
