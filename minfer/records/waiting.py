"""The waiting queue: a persistent sorted sequence, in buckets of bounded size.

Inserting or removing copies one bucket and the list of buckets: O(sqrt n) words at 10,000
waiting, where one flat tuple would copy them all. Bulk changes copy each bucket once. The
sequences of each client and of each adapter are counted, so that the queue is searched
past deferred clients and unready adapters only if it has others.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter
from typing import Final

from attrs import frozen

from minfer.records.adapters import ALL_READY, UnreadyAdapters
from minfer.records.sequence import Place, Sequence
from minfer.values import thresholds
from minfer.values.pmap import Map

_place: Final = attrgetter("place")


@frozen
class WaitingQueue:
    """Waiting sequences, by place. No bucket is empty."""

    buckets: tuple[tuple[Sequence, ...], ...] = ()
    size: int = 0
    counts: Map[str, int] = Map()  # sequences by client that can be deferred with it
    adapters: Map[str, int] = Map()  # sequences by adapter, of those that have one
    num_with_adapter: int = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self.buckets)

    def first(self) -> Sequence:
        """The head of the queue, which must not be empty."""
        return self.buckets[0][0]

    def first_but(
        self,
        deferred: Collection[str],
        loading: Collection[str] = (),
        unready: UnreadyAdapters = ALL_READY,
    ) -> Sequence | None:
        """The first sequence whose request is not in `loading`, whose adapter is not in
        `unready`, and whose client is not in `deferred`, or that ran before and so is
        never deferred.
        """
        if not (deferred or loading or unready):
            return self.first() if self.size else None
        if sum(self.counts.get(client, 0) for client in deferred) == self.size:
            return None
        if not self._has_ready(unready):
            return None
        for seq in self:
            free = seq.ran_before or seq.request.client not in deferred
            if not free or seq.request.id in loading:
                continue
            if seq.request.adapter not in unready:
                return seq
        return None

    def _has_ready(self, unready: UnreadyAdapters) -> bool:
        """Whether the adapter of any sequence is ready, or any has none."""
        adapters = self.adapters
        if unready.ready is not None:
            others = any(adapter in adapters for adapter in unready.ready)
            return others or self.num_with_adapter < self.size
        return sum(adapters.get(adapter, 0) for adapter in unready.passed) < self.size

    def last(self) -> Sequence:
        """The last sequence of the queue, which must not be empty."""
        return self.buckets[-1][-1]

    def find(self, place: Place) -> Sequence | None:
        """The sequence that waits at `place`, if any."""
        _, bucket, cut = self._spot(place)
        return next((seq for seq in bucket[cut : cut + 1] if seq.place == place), None)

    def insert(self, seq: Sequence) -> "WaitingQueue":
        """The queue with `seq` at its place, which must be unoccupied."""
        index, old, cut = self._spot(seq.place)
        new = (*old[:cut], seq, *old[cut:])
        half = len(new) // 2
        halves = (
            (new,) if len(new) < thresholds.QUEUE_BUCKET else (new[:half], new[half:])
        )
        buckets = (*self.buckets[:index], *halves, *self.buckets[index + 1 :])
        return self._counted(buckets, [seq], 1)

    def remove(self, place: Place) -> "WaitingQueue":
        """The queue without the sequence at `place`; the same queue if there is none."""
        index, old, cut = self._spot(place)
        if [seq.place for seq in old[cut : cut + 1]] != [place]:
            return self
        new = old[:cut] + old[cut + 1 :]
        rest = (new,) if new else ()
        buckets = (*self.buckets[:index], *rest, *self.buckets[index + 1 :])
        return self._counted(buckets, old[cut : cut + 1], -1)

    def insert_many(self, seqs: Iterable[Sequence]) -> "WaitingQueue":
        """The queue with all of `seqs` at their places, which must be unoccupied."""
        new, buckets = sorted(seqs, key=_place), list(self.buckets)
        full = thresholds.QUEUE_BUCKET
        firsts = [bucket[0].place for bucket in buckets]
        groups = groupby(new, key=lambda seq: max(0, bisect_right(firsts, seq.place) - 1))
        for index, group in reversed([(index, [*group]) for index, group in groups]):
            together = sorted((*chain(*buckets[index : index + 1]), *group), key=_place)
            size = len(together) if len(together) < full else max(1, full // 2)
            starts = range(0, len(together), size)
            buckets[index : index + 1] = [
                tuple(together[start : start + size]) for start in starts
            ]
        return self._counted(tuple(buckets), new, 1)

    def remove_many(self, places: Iterable[Place]) -> "WaitingQueue":
        """The queue without the sequences at those of the `places` that are occupied."""
        removed, buckets, out = set(places), list(self.buckets), list[Sequence]()
        firsts = [bucket[0].place for bucket in buckets]
        touched = {bisect_right(firsts, place) - 1 for place in removed}
        for index in touched - {-1}:
            out += [seq for seq in buckets[index] if seq.place in removed]
            buckets[index] = tuple(
                [seq for seq in buckets[index] if seq.place not in removed]
            )
        return self._counted(tuple(filter(None, buckets)), out, -1)

    def _counted(
        self,
        buckets: tuple[tuple[Sequence, ...], ...],
        seqs: Collection[Sequence],
        sign: int,
    ) -> "WaitingQueue":
        """The queue of `buckets`, to which these sequences were added (`sign` 1), or from
        which they were removed (-1).
        """
        clients = [seq.request.client for seq in seqs if not seq.ran_before]
        counts = _with_counts(self.counts, clients, sign)
        size = self.size + sign * len(seqs)
        adapters = [seq.request.adapter for seq in seqs if seq.request.adapter]
        if not (adapters or self.num_with_adapter):  # most engines have none
            return WaitingQueue(buckets, size, counts)
        by_adapter = _with_counts(self.adapters, adapters, sign)
        num_with_adapter = self.num_with_adapter + sign * len(adapters)
        return WaitingQueue(buckets, size, counts, by_adapter, num_with_adapter)

    def _spot(self, place: Place) -> tuple[int, tuple[Sequence, ...], int]:
        """The last bucket that starts at or before `place`, or the first, and the index
        in it.
        """
        after = bisect_right(self.buckets, place, key=lambda bucket: bucket[0].place)
        index = max(0, after - 1)
        bucket = self.buckets[index] if self.buckets else ()
        return index, bucket, bisect_left(bucket, place, key=_place)


def _with_counts(counts: Map[str, int], names: list[str], sign: int) -> Map[str, int]:
    """The counts with `sign` added for each of the names."""
    changes = Counter(names).items() if len(names) > 1 else [(name, 1) for name in names]
    for name, count in changes:
        now = counts.get(name, 0) + sign * count
        counts = counts.set(name, now) if now else counts.delete(name)
    return counts
