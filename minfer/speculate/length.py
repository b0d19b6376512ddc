"""The number of drafts of each row in a step: the most profitable.

Theory. If each draft is accepted with probability a, given that those before it were, the
k-th of a row is accepted with a^k, and adds that to the expected tokens of the step.
Verifying it costs the time by which one more input makes the step longer, which is
measured at start, for each number of inputs (`Costs`): next to nothing while a forward is
bound by reading weights, and more on a busy server. A draft model costs a forward of its
own for each place in which any row has a draft, which takes longer with more rows. Beside
prefill, rows with drafts may need a forward of their own, which is a cost as well
(`Costs.beside`).

A device takes as many inputs of each row with drafts as of the row with the most drafts:
places that a row leaves empty cost as much as used ones. So drafts are a rectangle, some
rows by a depth, and a step has the rectangle that maximises expected tokens over seconds.
Given both numbers, its rows are those with the most expected tokens within the depth. A
step's cost is constant up to the next size of forward that has a graph: so for each depth
only numbers of rows that fill such a size are tried. No drafts at all is among the
choices, and is taken unless another is better by `margin`: speculation must not make a
server slower. This is as accurate as the costs are.

The acceptance probability of a row is estimated from its recent drafts, with that of all
rows together as the prior. Counts decay, also in steps without drafts, towards the prior:
so a row without drafts, or all of them, is tried again now and then. Such a trial slows a
step by some percent: the rate of decay decides how often it happens (`Learning`).

With the default rule of acceptance the tokens do not depend on these numbers.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import add, mul
from typing import Final

from attrs import frozen

from minfer.records.acceptance import Costs

_MIN_EXPECTED_TOKENS: Final = 0.01  # tokens that a draft must be expected to yield
_DEPTHS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)  # depths to try, up to the deepest


@frozen
class ExpectedTokens:
    """The expected tokens of drafts, as a column over rows for each depth."""

    # Of each row, for its first draft, its first two, ...
    tokens: Sequence[Sequence[float]]
    max_drafts: Sequence[int]  # of each row: those for which any are expected

    @property
    def deepest(self) -> int:
        """The most drafts of a row."""
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """How many rows have any."""
        return len(self.max_drafts) - self.max_drafts.count(0)

    def likeliest(self, depth: int) -> list[int]:
        """The rows, those with the most expected tokens up to a depth first."""
        tokens = self.tokens[depth - 1]
        return sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)


@frozen
class Rectangle:
    """Drafts of the `count` likeliest rows, up to a depth."""

    depth: int
    count: int
    tokens: float  # expected of the step
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@frozen
class Lengths:
    """The number of drafts of each row, and the expected tokens and time of the step."""

    drafts: tuple[int, ...]
    tokens: float  # expected of the step
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def lengths(
    likelihoods: Sequence[float],
    max_drafts: Sequence[int],
    costs: Costs,
    other_inputs: int = 0,
    margin: float = 0.0,
    room: float = math.inf,
    *,
    prompts: bool = False,
) -> Lengths:
    """The numbers of drafts with the most expected tokens per second, in a step that has
    `other_inputs` inputs besides one for each row; none, unless they are better by
    `margin`. At most `room` drafts fit, if each row with drafts takes as many as the
    deepest. `prompts`: some of these inputs are prefill tokens.

    Each row has the likelihood of each of its drafts, if those before it are accepted,
    and the most drafts that it may have. Prefill tokens count as tokens, too: drafts must
    be worth slowing them down.
    """
    load = len(max_drafts) + other_inputs
    none = Lengths((0,) * len(max_drafts), float(load), costs.seconds(load))
    expected = _expected_tokens(likelihoods, max_drafts)
    best, best_rate = None, none.rate * (1 + margin)
    for rectangle in _rectangles(expected, costs, load, room, prompts):
        if rectangle.rate > best_rate:
            best, best_rate = rectangle, rectangle.rate
    if best is None:
        return none
    drafts = tuple(map(min, expected.max_drafts, repeat(best.depth)))
    if best.count < expected.rows:
        chosen = frozenset(expected.likeliest(best.depth)[: best.count])
        drafts = tuple([n if row in chosen else 0 for row, n in enumerate(drafts)])
    return Lengths(drafts, best.tokens, best.seconds)


def _rectangles(
    expected: ExpectedTokens, costs: Costs, load: int, room: float, prompts: bool
) -> Iterator[Rectangle]:
    """The rectangles worth trying, beside `load` inputs, which count as tokens, too."""
    rows = expected.rows
    for depth in _depths(expected.deepest):
        best = sorted(expected.tokens[depth - 1], reverse=True)
        sums = [*accumulate(best, initial=float(load))]
        for size, _ in costs.verify:
            count = min(int(min(size - load, room)) // depth, rows)
            if count > 0:
                inputs = load + count * depth
                seconds = costs.seconds(inputs, depth, count, prompts=prompts)
                yield Rectangle(depth, count, sums[count], seconds)


def _expected_tokens(
    likelihoods: Sequence[float], max_drafts: Sequence[int]
) -> ExpectedTokens:
    """The expected tokens of each row's drafts, while they are above
    `_MIN_EXPECTED_TOKENS`.
    """
    columns, worth = list[list[float]](), [0] * len(max_drafts)
    sums, likely = [0.0] * len(max_drafts), [1.0] * len(max_drafts)
    deepest, shallowest = max(max_drafts, default=0), min(max_drafts, default=0)
    for depth in range(1, deepest + 1):
        likely = [*map(mul, likely, likelihoods)]  # that `depth` drafts are accepted
        if depth <= shallowest and min(likely) >= _MIN_EXPECTED_TOKENS:
            worth = [depth] * len(max_drafts)
        else:
            bounds = zip(likely, max_drafts, strict=True)
            likely = [
                p if p >= _MIN_EXPECTED_TOKENS and depth <= max_depth else 0.0
                for p, max_depth in bounds
            ]
            worth = [depth if p else n for p, n in zip(likely, worth, strict=True)]
        if not any(likely):
            break
        sums = [*map(add, sums, likely)]
        columns.append(sums)
    return ExpectedTokens(columns, worth)


def _depths(deepest: int) -> list[int]:
    """The depths to try: a few of many."""
    return sorted({min(depth, deepest) for depth in (*_DEPTHS, deepest)} - {0})
