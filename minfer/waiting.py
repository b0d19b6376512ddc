"""The waiting line: a persistent sorted sequence, in buckets of bounded size.

Inserting or removing copies one bucket and the list of buckets: O(sqrt n) words at 10,000 waiting,
where one flat tuple would copy them all.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from attrs import frozen

from minfer.sequence import Place, Sequence


@frozen
class Line:
    """Sequences that wait, by place. No bucket is empty."""

    buckets: tuple[tuple[Sequence, ...], ...] = ()
    size: int = 0
    full: int = 128  # entries; a bucket that reaches them is split in two

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self.buckets)

    def first(self) -> Sequence:
        """Who is next; the line must not be empty."""
        return self.buckets[0][0]

    def last(self) -> Sequence:
        """Who is behind all others; the line must not be empty."""
        return self.buckets[-1][-1]

    def find(self, place: Place) -> Sequence | None:
        """Return who waits at `place`, if anybody does."""
        _, bucket, cut = self._spot(place)
        return next((seq for seq in bucket[cut : cut + 1] if seq.place == place), None)

    def insert(self, seq: Sequence) -> "Line":
        """Return the line with `seq` at its place, which nobody else has."""
        at, old, cut = self._spot(seq.place)
        new = (*old[:cut], seq, *old[cut:])
        half = len(new) // 2
        halves = (new,) if len(new) < self.full else (new[:half], new[half:])
        buckets = (*self.buckets[:at], *halves, *self.buckets[at + 1 :])
        return Line(buckets, self.size + 1, self.full)

    def remove(self, place: Place) -> "Line":
        """Return the line without the sequence at `place`; the same line if nobody is there."""
        at, old, cut = self._spot(place)
        if [seq.place for seq in old[cut : cut + 1]] != [place]:
            return self
        new = old[:cut] + old[cut + 1 :]
        rest = (new,) if new else ()
        buckets = (*self.buckets[:at], *rest, *self.buckets[at + 1 :])
        return Line(buckets, self.size - 1, self.full)

    def _spot(self, place: Place) -> tuple[int, tuple[Sequence, ...], int]:
        """The last bucket that starts at or before `place`, or the first, and where in it."""
        after = bisect_right(self.buckets, place, key=lambda bucket: bucket[0].place)
        at = max(0, after - 1)
        bucket = self.buckets[at] if self.buckets else ()
        return at, bucket, bisect_left(bucket, place, key=attrgetter("place"))
