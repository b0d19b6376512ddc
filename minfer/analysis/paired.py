"""Intervals of medians, and of paired differences: what is noise, and what is not.

Method. Several runs with different seeds are independent draws. The interval of their
median is that of the sign test (order statistics): with n draws, the k-th smallest and
the k-th largest, where k is the greatest with which the chance that fewer than k draws
fall on one side of the true median is at most 2.5%. It assumes nothing about how the
draws are distributed, and needs at least `MIN_DRAWS` of them. Two policies are compared
by the differences seed by seed, as both had the same load: what varies from load to load
cancels out.
"""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Final

from attrs import frozen

MIN_DRAWS: Final = 6  # with fewer no interval covers the median in 95% of cases
_ONE_SIDE: Final = 0.025


@frozen
class MedianInterval:
    """The median of draws, and an interval that covers the true one in 95% of cases."""

    median: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside: of differences, that they are not noise."""
        return not self.low <= 0 <= self.high


def median_interval(draws: Sequence[float]) -> MedianInterval:
    """The median of at least `MIN_DRAWS` draws with its interval."""
    if len(draws) < MIN_DRAWS:
        raise ValueError(f"{len(draws)} draws are too few for an interval")
    ordered = sorted(draws)
    rank = _rank(len(ordered))
    return MedianInterval(median(ordered), ordered[rank - 1], ordered[-rank])


def paired_difference(
    baseline: Sequence[float], others: Sequence[float]
) -> MedianInterval:
    """The differences of `others` from `baseline`, draw by draw."""
    pairs = zip(baseline, others, strict=True)
    return median_interval([other - base for base, other in pairs])


def _rank(count: int) -> int:
    """The rank of the ends of the interval of `count` draws."""
    rank, below = 0, 0.0  # the chance that at most `rank - 1` draws are on one side
    while below + comb(count, rank) / 2**count <= _ONE_SIDE:
        below += comb(count, rank) / 2**count
        rank += 1
    return rank
