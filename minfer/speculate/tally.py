"""Counts of proposed and accepted drafts, for metrics.

Theory. The acceptance rate is accepted drafts over proposed drafts; the token after them
is the target's own, and counts as neither. By place it is unconditional: of the drafts in
the k-th place of a row, how many were accepted, which requires that all before them were.
The mean length is the number of tokens that a row with drafts yields in a step: the
accepted ones, and the token after them.
"""

from itertools import zip_longest
from typing import Final

from attrs import frozen


@frozen
class DraftTally:
    """Counts of drafts, over any number of steps."""

    rows: int = 0  # rows with drafts, once for each step
    proposed: tuple[int, ...] = ()  # by place, from a row's first draft on
    accepted: tuple[int, ...] = ()  # likewise

    def plus(self, other: "DraftTally") -> "DraftTally":
        """The sum of both."""
        return DraftTally(
            self.rows + other.rows,
            _sum(self.proposed, other.proposed),
            _sum(self.accepted, other.accepted),
        )

    @property
    def rate(self) -> float:
        """Accepted drafts over proposed drafts; 0 if there were none."""
        return sum(self.accepted) / max(1, sum(self.proposed))

    @property
    def by_place(self) -> tuple[float, ...]:
        """The acceptance rate of each place."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return tuple(accepted / proposed for accepted, proposed in pairs)

    @property
    def mean_length(self) -> float:
        """Mean tokens of a row with drafts in a step; 0 if none had drafts."""
        return (self.rows + sum(self.accepted)) / self.rows if self.rows else 0.0


NO_DRAFTS: Final = DraftTally()


def of_row(proposed: int, accepted: int) -> DraftTally:
    """The drafts of one row in one step."""
    by_place = tuple(int(place < accepted) for place in range(proposed))
    return DraftTally(1, (1,) * proposed, by_place)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(left, right, fillvalue=0)))
