"""An append-only sequence in two levels: most of it is shared, the recent end is copied.

Block tables, keys and histories of long contexts get an entry now and then; a flat tuple
would be copied each time, and copying a tuple touches every object in it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar, overload

from attrs import frozen

T = TypeVar("T")


@frozen(eq=False)
class Log(Generic[T]):
    """Entries `old` and then `recent`; slices are plain tuples."""

    old: tuple[T, ...] = ()
    recent: tuple[T, ...] = ()

    def __len__(self) -> int:
        return len(self.old) + len(self.recent)

    def __iter__(self) -> Iterator[T]:
        return chain(self.old, self.recent)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        old, recent = self.old, self.recent
        cut = len(old)
        if isinstance(index, int):
            position = index if index >= 0 else index + cut + len(recent)
            return old[position] if position < cut else recent[position - cut]
        start, stop, _ = index.indices(cut + len(recent))  # steps are not used here
        if start >= cut:
            return recent[start - cut : max(0, stop - cut)]
        return old[start:stop] + recent[: max(0, stop - cut)]

    def extended(self, entries: tuple[T, ...], recent_entries: int) -> "Log[T]":
        """The log with more `entries`; once there are `recent_entries` recent ones, they
        join the old.
        """
        if len(self.recent) < recent_entries:
            return Log(self.old, self.recent + entries)
        return Log(self.old + self.recent, entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Log | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
