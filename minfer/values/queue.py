"""A persistent queue: entries are added at its end, and dropped at its beginning.

Theory. Entries are in runs, by number: a short last run is made longer, and of the first
one a number says how many are gone. So both ends change at the cost of a run, however
many entries wait between them. No run is empty.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from attrs import frozen

from minfer.values.pmap import Map

T = TypeVar("T")
RUN_ENTRIES: Final = 64  # entries of a last run, from which on a new one is begun


@frozen
class Queue(Generic[T]):
    """Entries in the order in which they are taken."""

    runs: Map[int, tuple[T, ...]] = Map()
    first: int = 0  # number of the first run
    gone: int = 0  # entries of the first run that were dropped
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[T]:
        for number in range(self.first, self.first + len(self.runs)):
            run = self.runs[number]
            yield from islice(run, self.gone, None) if number == self.first else run

    def extended(self, entries: tuple[T, ...], max_size: int) -> "Queue[T]":
        """The queue with `entries` at its end; its last `max_size` are kept."""
        if not entries:
            return self
        last = self.first + len(self.runs) - 1
        run = self.runs.get(last, ())
        number, run = (last, run) if 0 < len(run) < RUN_ENTRIES else (last + 1, ())
        size = self.size + len(entries)
        longer = Queue(self.runs.set(number, run + entries), self.first, self.gone, size)
        return longer.without_first(max(0, size - max_size))

    def without_first(self, count: int) -> "Queue[T]":
        """The queue without its first `count` entries, of which it has as many."""
        if not count:
            return self
        runs, first, dropped = self.runs, self.first, self.gone + count
        while runs and dropped >= len(runs[first]):
            dropped -= len(runs[first])
            runs, first = runs.delete(first), first + 1
        return Queue(runs, first, dropped, self.size - count)
