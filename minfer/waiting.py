"""The waiting line: a persistent sorted sequence, in buckets of bounded size.

Inserting or removing copies one bucket and the list of buckets: O(sqrt n) words at 10,000
waiting, where one flat tuple would copy them all. Many at once copy each bucket that they
touch once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter
from typing import Final

from attrs import frozen

from minfer.sequence import Place, Sequence

_place: Final = attrgetter("place")


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
        """Return the line without the sequence at `place`; the same line if nobody is
        there.
        """
        at, old, cut = self._spot(place)
        if [seq.place for seq in old[cut : cut + 1]] != [place]:
            return self
        new = old[:cut] + old[cut + 1 :]
        rest = (new,) if new else ()
        buckets = (*self.buckets[:at], *rest, *self.buckets[at + 1 :])
        return Line(buckets, self.size - 1, self.full)

    def insert_many(self, seqs: Iterable[Sequence]) -> "Line":
        """Return the line with all of `seqs` at their places, which nobody else has."""
        new, buckets = sorted(seqs, key=_place), list(self.buckets)
        firsts = [bucket[0].place for bucket in buckets]
        groups = groupby(new, key=lambda seq: max(0, bisect_right(firsts, seq.place) - 1))
        for at, group in reversed([(at, [*group]) for at, group in groups]):
            together = sorted((*chain(*buckets[at : at + 1]), *group), key=_place)
            size = len(together) if len(together) < self.full else max(1, self.full // 2)
            starts = range(0, len(together), size)
            buckets[at : at + 1] = [tuple(together[one : one + size]) for one in starts]
        return Line(tuple(buckets), self.size + len(new), self.full)

    def remove_many(self, places: Iterable[Place]) -> "Line":
        """Return the line without those at `places`, as far as somebody is there."""
        gone, buckets = set(places), list(self.buckets)
        firsts = [bucket[0].place for bucket in buckets]
        touched = {bisect_right(firsts, place) - 1 for place in gone}
        for at in touched - {-1}:
            buckets[at] = tuple([seq for seq in buckets[at] if seq.place not in gone])
        left = tuple(filter(None, buckets))
        return Line(left, sum(map(len, left)), self.full)

    def _spot(self, place: Place) -> tuple[int, tuple[Sequence, ...], int]:
        """The last bucket that starts at or before `place`, or the first, and where in
        it.
        """
        after = bisect_right(self.buckets, place, key=lambda bucket: bucket[0].place)
        at = max(0, after - 1)
        bucket = self.buckets[at] if self.buckets else ()
        return at, bucket, bisect_left(bucket, place, key=_place)
