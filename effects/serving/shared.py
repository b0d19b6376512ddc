"""Counts that all processes of a server see, so that a bound holds for the whole of it.

Theory. Memory that is mapped before processes are forked is the same memory in each of
them. In a `Tally` each process has a place of its own, which it alone writes; what counts
is their sum: connections, viewers. A process that takes the place of another, which may
have died, clears that place first.
"""

import mmap
from typing import Final

from attrs import field, frozen

_BYTES: Final = 8  # of a number


def mapped(count: int) -> memoryview:
    """Memory for so many numbers, all 0, that processes forked from here on share."""
    return memoryview(mmap.mmap(-1, max(1, count) * _BYTES))


@frozen
class Tally:
    """How many there are of something, by process."""

    _counts: memoryview = field(factory=lambda: mapped(1).cast("q"))
    _place: int = 0

    @classmethod
    def of(cls, places: int) -> "Tally":
        """A tally of so many processes, as the first of them sees it."""
        return cls(mapped(places).cast("q"))

    def at(self, place: int) -> "Tally":
        """The tally as the process at this place sees it, which has nothing yet."""
        taken = Tally(self._counts, place)
        taken.set(0)
        return taken

    @property
    def own(self) -> int:
        """How many this process has."""
        return self._counts[self._place]

    @property
    def total(self) -> int:
        """How many all have."""
        return sum(self._counts)

    def set(self, count: int) -> None:
        """Say how many this process has."""
        self._counts[self._place] = count


@frozen(kw_only=True)
class Shared:
    """What the fronts of a server count together."""

    connections: Tally = field(factory=Tally)
    viewers: Tally = field(factory=Tally)  # of the live view

    @classmethod
    def of(cls, fronts: int) -> "Shared":
        """What so many fronts count, which are forked after this."""
        return cls(connections=Tally.of(fronts), viewers=Tally.of(fronts))

    def at(self, front: int) -> "Shared":
        """The same as one front sees it, which has nothing yet."""
        return Shared(
            connections=self.connections.at(front), viewers=self.viewers.at(front)
        )
