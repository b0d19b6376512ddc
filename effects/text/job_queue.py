"""The queue of jobs for workers.

Theory. Each client has a queue of its own, and clients take turns, so that one client's
jobs delay its own alone; within a client the smallest job goes first. A worker may be
reserved for jobs up to a size: then there is always one that is soon free for small ones.
Workers prepare bodies, or compile grammars.
"""

import heapq
from collections import OrderedDict
from itertools import count
from typing import Generic, TypeVar

from attrs import field, frozen

Job = TypeVar("Job")


@frozen(order=True)
class Place(Generic[Job]):
    """A job's place in its client's queue."""

    size: int
    number: int  # of all jobs so far
    client: str = field(order=False)
    job: Job = field(order=False)


class Line(Generic[Job]):
    """Waiting jobs, by client."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[Place[Job]]] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def count(self, client: str) -> int:
        """The number of a client's waiting jobs."""
        return len(self._lines.get(client, ()))

    def add(self, job: Job, client: str, size: int) -> Place[Job]:
        """Add a job to its client's queue."""
        place = Place(size, next(self._numbers), client, job)
        heapq.heappush(self._lines.setdefault(client, []), place)
        return place

    def remove(self, place: Place[Job]) -> None:
        """Remove a job, if it still waits."""
        line = self._lines.get(place.client, [])
        if place in line:
            line.remove(place)
            heapq.heapify(line)
            self._forget_empty(place.client)

    def take(self, most: int | None = None) -> Job | None:
        """The next job of those up to a size; None if there is none.

        Its client goes behind all others.
        """
        for client, line in self._lines.items():
            if most is None or line[0].size <= most:
                job = heapq.heappop(line).job
                self._lines.move_to_end(client)
                self._forget_empty(client)
                return job
        return None

    def _forget_empty(self, client: str) -> None:
        if not self._lines[client]:
            del self._lines[client]
