"""The waiting line: a persistent sorted sequence, in buckets of bounded size.

Inserting or removing copies one bucket and the list of buckets: O(sqrt n) words at 10,000 waiting,
where one flat tuple would copy them all.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from minfer.sequence import Place, Sequence

_FULL: Final = 128  # entries; a bucket that reaches it is split in two

_Bucket = tuple[tuple[Place, Sequence], ...]


@frozen
class Line:
    """Sequences that wait, by place. No bucket is empty."""

    buckets: tuple[_Bucket, ...] = ()
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for bucket in self.buckets for _, seq in bucket)

    def first(self) -> Sequence:
        """Who is next; the line must not be empty."""
        return self.buckets[0][0][1]

    def find(self, place: Place) -> Sequence | None:
        """Return who waits at `place`, if anybody does."""
        if not self.buckets:
            return None
        bucket = self.buckets[self._bucket(place)]
        cut = bisect_left(bucket, (place,))
        return bucket[cut][1] if cut < len(bucket) and bucket[cut][0] == place else None

    def insert(self, seq: Sequence) -> "Line":
        """Return the line with `seq` at its place, which nobody else has."""
        if not self.buckets:
            return Line((((seq.place, seq),),), 1)
        at = self._bucket(seq.place)
        old = self.buckets[at]
        cut = bisect_left(old, (seq.place,))
        new = (*old[:cut], (seq.place, seq), *old[cut:])
        half = len(new) // 2
        halves = (new,) if len(new) < _FULL else (new[:half], new[half:])
        return Line((*self.buckets[:at], *halves, *self.buckets[at + 1 :]), self.size + 1)

    def remove(self, place: Place) -> "Line":
        """Return the line without the sequence at `place`; the same line if nobody is there."""
        if not self.buckets:
            return self
        at = self._bucket(place)
        old = self.buckets[at]
        cut = bisect_left(old, (place,))
        if cut == len(old) or old[cut][0] != place:
            return self
        new = old[:cut] + old[cut + 1 :]
        rest = (new,) if new else ()
        return Line((*self.buckets[:at], *rest, *self.buckets[at + 1 :]), self.size - 1)

    def _bucket(self, place: Place) -> int:
        """The last bucket that starts at or before `place`, or the first one."""
        return max(0, bisect_right(self.buckets, place, key=lambda bucket: bucket[0][0]) - 1)
