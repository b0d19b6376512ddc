"""Arithmetic, exactly: percentiles, gaps of several tokens, the steady part."""

import numpy as np
import pytest

from minfer.effects.runs.load.record import Record
from minfer.effects.runs.load.statistics import (
    Span,
    event_tokens,
    gaps,
    in_flight,
    spread,
    tokens_in,
)


def test_percentiles_are_numpys() -> None:
    found = spread(range(101))
    assert found is not None
    assert (found.mean, found.median, found.p90, found.p95, found.p99) == (
        50,
        50,
        90,
        95,
        99,
    )
    assert (found.most, found.count) == (100, 101)
    middle = spread([1, 2])
    assert middle is not None
    assert middle.median == 1.5
    assert spread([]) is None


def test_a_weight_counts_as_so_many_values() -> None:
    weighted = spread([5.0, 1.0, 2.0], [1, 98, 1])
    assert weighted is not None
    assert weighted.mean == pytest.approx((98 + 2 + 5) / 100)
    assert (weighted.median, weighted.p95, weighted.p99, weighted.count) == (1, 1, 2, 100)


def record(
    sent: float, *events: float, tokens: tuple[int, ...] = (), output: int = 0
) -> Record:
    return Record(
        0,
        sent,
        sent,
        events[-1],
        events=events,
        tokens=tokens,
        output_tokens=output or sum(tokens) or len(events),
    )


def test_a_gap_in_which_several_tokens_came_counts_as_several() -> None:
    one = record(0, 1.0, 2.0, 5.0, tokens=(1, 1, 3))
    found = gaps([one])
    assert found.seconds.tolist() == [1, 3]
    assert found.tokens.tolist() == [1, 3]
    assert found.each.tolist() == [1, 1]
    itl = spread(found.each, found.tokens)
    assert itl is not None
    assert itl.mean == one.tpot == 1
    assert itl.count == 4


def test_tokens_that_nobody_told_of_are_spread_so_that_itl_is_tpot() -> None:
    one = record(0, 1.0, 2.0, 7.0, output=7)
    assert event_tokens(one).tolist() == [1, 3, 3]
    found = gaps([one])
    itl = spread(found.each, found.tokens)
    assert itl is not None
    assert itl.mean == pytest.approx(one.tpot) == 1
    assert event_tokens(record(0, 1.0, output=4)).tolist() == [4]
    assert event_tokens(Record(0, 0, 0, 1)).tolist() == []


def test_gaps_do_not_lead_from_one_request_to_the_next() -> None:
    found = gaps([record(0, 1.0, 2.0), record(0, 5.0, 6.5), record(0, 9.0)])
    assert found.seconds.tolist() == [1, 1.5]
    assert gaps([]).seconds.tolist() == []


def test_an_event_without_a_token_ends_no_gap() -> None:
    found = gaps([record(0, 1.0, 2.0, 4.0, tokens=(1, 0, 2))])
    assert found.seconds.tolist() == [3]
    assert found.each.tolist() == [1.5]


def test_the_steady_part_of_a_closed_loop_is_without_ramps() -> None:
    records = [record(i / 10, i / 10 + 1) for i in range(2)]  # two clients, one later
    records += [
        record(one.sent + n, one.ended + n) for one in records for n in range(1, 5)
    ]
    flight = in_flight(records)
    assert flight.most == 2
    assert flight.mean == pytest.approx(10 / 5.1)
    steady = flight.steady()
    assert steady is not None
    assert (steady.begin, steady.end) == pytest.approx((0.1, 5.0))


def test_a_load_that_is_all_there_at_once_has_no_steady_part() -> None:
    assert in_flight([record(0, 1.0 + i) for i in range(4)]).steady() is None
    assert in_flight([]).steady() is None
    assert in_flight([]).most == 0
    assert in_flight([]).mean == 0


def test_tokens_are_counted_where_they_came() -> None:
    one = record(0, 1.0, 2.0, 3.0, tokens=(1, 4, 2))
    assert tokens_in(one, Span(1.0, 2.5)) == 4
    assert tokens_in(one, Span(0.0, 3.0)) == 7
    whole = Record(0, 0, 0, ended=2.0, output_tokens=9)
    assert (tokens_in(whole, Span(1, 2)), tokens_in(whole, Span(2, 3))) == (9, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_weighted_spread_is_that_of_repeated_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = rng.random(50), rng.integers(1, 9, 50)
    found = spread(values, weights)
    assert found is not None
    repeated = np.sort(np.repeat(values, weights))
    assert found.mean == pytest.approx(repeated.mean())
    for share, value in ((0.5, found.median), (0.9, found.p90), (0.99, found.p99)):
        assert value == repeated[int(np.ceil(share * len(repeated))) - 1]
