"""Arithmetic of latencies and rates: weighted percentiles, and a load's steady part.

The steady part begins when as many requests are on their way as are half of the time
(the median over time), and ends when that is so for the last time. In a closed loop that
is from the moment in which all clients are busy to the one in which the first finds
nothing more to do; in an open one, it leaves out how the crowd gathers and how it goes.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike

from minfer.effects.runs.load.record import Record

Floats = np.ndarray[Any, np.dtype[np.float64]]
PERCENTILES: Final = (90, 95, 99)


@frozen
class Spread:
    """How values are spread."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    most: float
    count: float  # how many values; with weights, their sum


def spread(values: ArrayLike, weights: ArrayLike | None = None) -> Spread | None:
    """How values are spread; a value of weight 3 counts as three. None if there are none.

    Between two values percentiles are interpolated, as numpy does, unless weights differ:
    then they are values that occur.
    """
    found = np.asarray(values, np.float64)
    if not found.size:
        return None
    counts = np.ones_like(found) if weights is None else np.asarray(weights, np.float64)
    shares = np.array((50, *PERCENTILES)) / 100
    if np.ptp(counts) == 0:
        points = np.quantile(found, shares)
    else:
        order = np.argsort(found)
        upto = np.cumsum(counts[order])
        places = np.searchsorted(upto, shares * upto[-1] * (1 - 1e-12))
        points = found[order][places]
    median, p90, p95, p99 = map(float, points)
    return Spread(
        mean=float(np.average(found, weights=counts)),
        median=median,
        p90=p90,
        p95=p95,
        p99=p99,
        most=float(found.max()),
        count=float(counts.sum()),
    )


@frozen
class Gaps:
    """Times between events, and how many tokens came after each."""

    seconds: Floats
    tokens: Floats

    @property
    def each(self) -> Floats:
        """Seconds for each token that came after a gap."""
        return self.seconds / self.tokens


def event_tokens(record: Record) -> Floats:
    """How many tokens each event brought.

    Where the server did not say, the first brought one, and the others all the same: so
    the mean of a request's ITL is its TPOT.
    """
    events = len(record.events)
    if len(record.tokens) == events:
        return np.asarray(record.tokens, np.float64)
    if events == 1:
        return np.array([max(1.0, record.output_tokens)])
    each = max(1.0, (record.output_tokens - 1) / (events - 1))
    return np.array([1.0, *[each] * (events - 1)])


def gaps(records: Sequence[Record]) -> Gaps:
    """All gaps of all requests; an event of which the server says that it brought no
    token is no end of one.
    """
    seconds, tokens = [np.empty(0)], [np.empty(0)]
    for record in records:
        brought = event_tokens(record)
        some = brought > 0
        seconds.append(np.diff(np.asarray(record.events, np.float64)[some]))
        tokens.append(brought[some][1:])
    return Gaps(np.concatenate(seconds), np.concatenate(tokens))


@frozen
class Span:
    """A part of a run, in seconds since its beginning."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin

    def has(self, moment: float) -> bool:
        """Whether something happened in it."""
        return self.begin < moment <= self.end


@frozen
class InFlight:
    """How many requests were on their way, from each moment to the next."""

    times: Floats
    counts: Floats

    @property
    def most(self) -> int:
        """How many at once, at most."""
        return int(self.counts.max(initial=0))

    @property
    def mean(self) -> float:
        """How many on average."""
        spans = np.diff(self.times)
        whole = float(spans.sum())
        return float((self.counts[:-1] * spans).sum()) / whole if whole > 0 else 0.0

    def steady(self) -> Span | None:
        """The part without ramps; None if half of all requests were there at once."""
        spans = np.diff(self.times)
        if not spans.sum() > 0 or 4 * self.most > len(self.times):
            return None
        middle = spread(*_present(self.counts[:-1], spans))
        if middle is None:
            return None
        there = np.flatnonzero((self.counts[:-1] >= middle.median) & (spans > 0))
        return Span(float(self.times[there[0]]), float(self.times[there[-1] + 1]))


def _present(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Values that have a weight."""
    return values[weights > 0], weights[weights > 0]


def in_flight(records: Sequence[Record]) -> InFlight:
    """How many requests were on their way, over time."""
    begun = np.array([one.sent for one in records], np.float64)
    ended = np.array([one.ended for one in records], np.float64)
    moments = np.concatenate([ended, begun])  # one that ends makes room for another
    steps = np.concatenate([-np.ones_like(ended), np.ones_like(begun)])
    order = np.argsort(moments, kind="stable")
    return InFlight(moments[order], np.cumsum(steps[order]))


def tokens_in(record: Record, span: Span) -> float:
    """How many output tokens came in a part of a run."""
    if not record.events:
        return record.output_tokens if span.has(record.ended) else 0.0
    times = np.asarray(record.events, np.float64)
    inside = (span.begin < times) & (times <= span.end)
    return float(event_tokens(record)[inside].sum())
