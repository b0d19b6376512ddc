"""Counts shared by all processes of a server, for bounds that hold for the whole of it.

Theory. Memory that is mapped before processes are forked is the same memory in each of
them. In a `SharedCount` each process has a place of its own, which it alone writes; the
bound is on their sum: connections, viewers. A process that takes the place of another,
which may have died, clears that place first.
"""

import mmap
from typing import Final

from attrs import field, frozen

_INTEGER_BYTES: Final = 8  # of a number


def shared_memory(count: int) -> memoryview:
    """Memory for `count` numbers, all 0, shared by the processes forked from here on."""
    return memoryview(mmap.mmap(-1, max(1, count) * _INTEGER_BYTES))


@frozen
class SharedCount:
    """A count by process."""

    _counts: memoryview = field(factory=lambda: shared_memory(1).cast("q"))
    _place: int = 0

    @classmethod
    def of(cls, places: int) -> "SharedCount":
        """A count of `places` processes, for the first of them."""
        return cls(shared_memory(places).cast("q"))

    def at(self, place: int) -> "SharedCount":
        """The count for the process at this place, whose count is 0."""
        own_count = SharedCount(self._counts, place)
        own_count.set(0)
        return own_count

    @property
    def own(self) -> int:
        """The count of this process."""
        return self._counts[self._place]

    @property
    def total(self) -> int:
        """The sum of all processes."""
        return sum(self._counts)

    def set(self, count: int) -> None:
        """Set the count of this process."""
        self._counts[self._place] = count


@frozen(kw_only=True)
class SharedCounts:
    """The counts that the API servers of a server share."""

    connections: SharedCount = field(factory=SharedCount)
    viewers: SharedCount = field(factory=SharedCount)  # of the live view

    @classmethod
    def of(cls, api_servers: int) -> "SharedCounts":
        """The counts of `api_servers` API servers, which are forked after this."""
        return cls(
            connections=SharedCount.of(api_servers), viewers=SharedCount.of(api_servers)
        )

    def at(self, api_server: int) -> "SharedCounts":
        """The same for one API server, whose counts are 0."""
        return SharedCounts(
            connections=self.connections.at(api_server),
            viewers=self.viewers.at(api_server),
        )
