"""How many drafts each row takes in a step: as many as pay.

Theory. If each draft is accepted with probability a, given that those before it were, the
k-th of a row is accepted with a^k, and that is what it adds to the tokens that the step
is expected to yield. Verifying it costs what the step takes longer for one more input,
which is measured at start, for each number of inputs (`Costs`): next to nothing while a
forward is bound by reading weights, and the more the busier the server is. A draft model
costs a forward of its own for each place that any row has a draft in, which takes the
longer the more rows take part. Beside prompts, rows with drafts may be a forward of their
own, which is a cost as well (`Costs.beside`).

A device takes as many inputs of each row that drafts as of the one that has the most
drafts: what a row leaves empty costs as much as what it uses. So drafts are a rectangle,
some rows by a depth, and a step has the one that maximises expected tokens over seconds.
Given both numbers, its rows are those that promise the most within the depth. A step's
cost is constant up to the next size of forward that there is a graph for: only numbers of
rows that fill one up need to be tried, for each depth. No drafts at all is among the
choices, and wins unless others promise to be better by `margin`: speculation is not to
make a server slower than it is without. That is as true as the costs are.

How likely a row's drafts are is learnt from what became of its last ones, beginning with
what is true of all rows together. Counts fade, also
in steps without drafts, towards what was assumed before: so a row, or all of them, that
was given up is tried again, now and then. Such a try costs a step some percent: what has
faded when it takes place decides how often that may be (`Learning`).

The default rule of acceptance yields the same tokens whatever is decided here.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat, takewhile
from operator import itemgetter, mul
from typing import Any, Final

from attrs import field, frozen

from minfer.checks import ConfigError, number

_HARDLY: Final = 0.01  # tokens that a draft must be expected to yield
_DEPTHS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)  # that are tried, and the deepest
Table = tuple[tuple[int, float], ...]  # of sizes and seconds


def _setting(default: float, **how: Any) -> Any:
    return field(default=default, validator=number(0, of="speculation: ", **how))


@frozen(kw_only=True)
class Learning:
    """How quickly estimates follow. Raises ConfigError for what is not from 0 to 1."""

    assumed: float = _setting(0.6)  # acceptance, before anything is known
    # Of that, in drafts: by a few that were rejected nobody is given up.
    weight: float = _setting(10.0, above=True)
    kept: float = _setting(0.98)  # of older counts, whenever drafts were judged
    most: float = _setting(100.0, above=True)  # drafts that are remembered
    # Likewise, for each step without drafts: who was given up is tried again before most
    # answers are over.
    rested: float = _setting(0.995)

    def __attrs_post_init__(self) -> None:
        for name in ("assumed", "kept", "rested"):
            if getattr(self, name) > 1:
                raise ConfigError(f"speculation: {name} must be at most 1")


@frozen
class Record:
    """What became of the drafts of a row, or of all rows, lately."""

    judged: float = 0.0  # drafts all before which were accepted
    accepted: float = 0.0  # of these

    def told(self, how: Learning, judged: int, accepted: int) -> "Record":
        """After a step in which so many drafts were judged, or none."""
        fade = how.kept if judged else how.rested
        count = self.judged * fade + judged
        # However many there were: what is remembered for long is given up too late.
        share = min(1.0, how.most / count) if count else 1.0
        return Record(count * share, (self.accepted * fade + accepted) * share)

    def rested(self, how: Learning, steps: int) -> "Record":
        """After so many steps without drafts."""
        fade = how.rested**steps
        return Record(self.judged * fade, self.accepted * fade)

    def likelihood(self, how: Learning, assumed: float) -> float:
        """How likely the next draft is accepted, if those before it are; as `assumed`
        while little is known.
        """
        hits = self.accepted + assumed * how.weight
        return hits / (self.judged + how.weight)


def judged(proposed: int, accepted: int) -> int:
    """How many of a row's drafts show how likely they were: those behind one that was
    rejected do not.
    """
    return min(accepted + 1, proposed)


@frozen
class Costs:
    """What steps take, in seconds. Raises ConfigError for tables that cannot be.

    What is larger than the largest size was not measured: no drafts are added to it.
    """

    # A forward of the target with so many inputs, or fewer, and its seconds; both rising.
    verify: Table
    draft: float = _setting(0.0)  # a forward of the draft model, for one row
    # What drafts cost however few there are: of the host, that cannot plan ahead.
    fixed: float = _setting(0.0)
    # Seconds that a forward of the draft model takes longer for up to so many rows; both
    # rising. For more rows than any of these it takes as long as for the most.
    draft_more: Table = ()
    # What drafts cost beside inputs of prompts, where they take a forward of their own.
    beside: float = _setting(0.0)

    def __attrs_post_init__(self) -> None:
        if not self.verify or self.verify[0][1] <= 0:
            raise ConfigError("speculation: costs must be pairs of numbers above 0")
        for table in (self.verify, self.draft_more):
            _check_table(table)

    def seconds(
        self, inputs: int, depth: int = 0, rows: int = 1, *, prompts: bool = False
    ) -> float:
        """A step with so many inputs, in which `rows` have up to `depth` drafts; endless
        if that was not measured. `prompts`: some inputs are of prompts.
        """
        at = bisect_left(self.verify, (inputs, 0.0))
        if at == len(self.verify):
            return math.inf
        verified = self.verify[at][1]
        if not depth:
            return verified
        fixed = self.fixed + (self.beside if prompts else 0.0)
        return verified + depth * self.drafted(rows) + fixed

    def drafted(self, rows: int) -> float:
        """A forward of the draft model for so many rows."""
        if not self.draft_more:
            return self.draft
        at = bisect_left(self.draft_more, (rows, 0.0))
        return self.draft + self.draft_more[min(at, len(self.draft_more) - 1)][1]


def _check_table(table: Table) -> None:
    sizes = [size for size, _ in table]
    seconds = [each for _, each in table]
    if any(size < 1 for size in sizes) or not all(
        0 <= each < math.inf for each in seconds
    ):
        raise ConfigError("speculation: costs must be pairs of numbers above 0")
    if sizes != sorted(set(sizes)) or seconds != sorted(seconds):
        raise ConfigError("speculation: costs must rise with sizes")


@frozen
class Row:
    """What drafts of a row promise."""

    likelihood: float  # of each, if those before it are accepted
    most: int  # drafts that it may have


@frozen
class Promises:
    """What drafts of rows are worth, as columns: of rows of which anything can be
    expected.
    """

    rows: Sequence[int]  # their numbers
    # Tokens that the first, the first two, ... drafts of each should yield.
    sums: Sequence[tuple[float, ...]]

    @property
    def deepest(self) -> int:
        """The most drafts of a row."""
        return max(map(len, self.sums), default=0)

    def tokens(self, depth: int) -> list[float]:
        """What each row's drafts up to a depth should yield."""
        if depth <= min(map(len, self.sums)):
            return [*map(itemgetter(depth - 1), self.sums)]
        return [some[min(depth, len(some)) - 1] for some in self.sums]


@frozen
class Rectangle:
    """Drafts of the first `count` of some promises, up to a depth."""

    depth: int
    order: Sequence[int]  # places in the columns of promises
    count: int
    tokens: float  # by which the step gets on
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@frozen
class Lengths:
    """How many drafts each row has, and what is expected to come of it."""

    drafts: tuple[int, ...]
    tokens: float  # by which the step gets on
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def lengths(
    rows: Sequence[Row],
    costs: Costs,
    others: int = 0,
    margin: float = 0.0,
    room: float = math.inf,
    *,
    prompts: bool = False,
) -> Lengths:
    """The numbers of drafts with the most expected tokens a second, in a step that has
    `others` inputs besides one for each row; none, unless they are better by `margin`.
    There is `room` for so many, if each row that has some takes as much as the deepest.
    `prompts`: some of these inputs are of prompts.

    Inputs of prompts count as tokens, too: they must not be slowed down for less.
    """
    load = len(rows) + others
    none = Lengths((0,) * len(rows), float(load), costs.seconds(load))
    promises = _promises(rows)
    best, bar = None, none.rate * (1 + margin)
    for tried in _rectangles(promises, costs, load, room, prompts):
        if tried.rate > bar:
            best, bar = tried, tried.rate
    if best is None:
        return none
    each = [0] * len(rows)
    for at in best.order[: best.count]:
        each[promises.rows[at]] = min(best.depth, len(promises.sums[at]))
    return Lengths(tuple(each), best.tokens, best.seconds)


def _rectangles(
    promises: Promises, costs: Costs, load: int, room: float, prompts: bool
) -> Iterator[Rectangle]:
    """All that are worth a try, beside so many inputs that are tokens, too."""
    for depth in _depths(promises.deepest):
        tokens = promises.tokens(depth)
        order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
        best = map(tokens.__getitem__, order)
        sums = [*accumulate(best, initial=float(load))]
        for size, _ in costs.verify:
            count = min(int(min(size - load, room)) // depth, len(order))
            if count > 0:
                inputs = load + count * depth
                seconds = costs.seconds(inputs, depth, count, prompts=prompts)
                yield Rectangle(depth, order, count, sums[count], seconds)


def _promises(rows: Sequence[Row]) -> Promises:
    """Of each row's drafts, as far as anything can be expected of them."""
    places, sums = list[int](), list[tuple[float, ...]]()
    for place, row in enumerate(rows):
        likely = [*accumulate(repeat(row.likelihood, row.most), mul)]
        if likely and likely[-1] < _HARDLY:
            likely = [*takewhile(_HARDLY.__le__, likely)]
        if likely:
            places.append(place)
            sums.append(tuple(accumulate(likely)))
    return Promises(places, sums)


def _depths(deepest: int) -> list[int]:
    """The depths that are tried: of many, few."""
    return sorted({min(depth, deepest) for depth in (*_DEPTHS, deepest)} - {0})
