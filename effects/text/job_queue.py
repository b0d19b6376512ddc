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
class QueuedJob(Generic[Job]):
    """A job's place in its client's queue."""

    size: int
    number: int  # of all jobs so far
    client: str = field(order=False)
    job: Job = field(order=False)


class JobQueue(Generic[Job]):
    """Waiting jobs, by client."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, list[QueuedJob[Job]]] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count(self, client: str) -> int:
        """The number of a client's waiting jobs."""
        return len(self._queues.get(client, ()))

    def add(self, job: Job, client: str, size: int) -> QueuedJob[Job]:
        """Add a job to its client's queue."""
        queued = QueuedJob(size, next(self._numbers), client, job)
        heapq.heappush(self._queues.setdefault(client, []), queued)
        return queued

    def remove(self, queued: QueuedJob[Job]) -> None:
        """Remove a job, if it still waits."""
        queue = self._queues.get(queued.client, [])
        if queued in queue:
            queue.remove(queued)
            heapq.heapify(queue)
            self._forget_empty(queued.client)

    def take(self, max_size: int | None = None) -> Job | None:
        """The next job of those up to a size; None if there is none.

        Its client becomes the last one.
        """
        for client, queue in self._queues.items():
            if max_size is None or queue[0].size <= max_size:
                job = heapq.heappop(queue).job
                self._queues.move_to_end(client)
                self._forget_empty(client)
                return job
        return None

    def _forget_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]
