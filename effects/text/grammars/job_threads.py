"""A few threads for a queue of jobs, which do not delay the program's end.

Theory. `ThreadPoolExecutor` keeps jobs in a queue of its own, and at the end of the
program completes all of them. Here the queue is ours, and the executor has no more jobs
than threads: the next one is submitted by the job that ends. When the program ends that
is refused, and all waiting jobs are cancelled; so only jobs that have begun delay it.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import cpu_count
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
Job = Callable[[], None]
# For slow work: the driver, and the library's parallel calls, need the other processors.
SLOW_WORK_THREADS: Final = max(1, min(8, (cpu_count() or 1) // 2))


class JobThreads:
    """The used part of `ThreadPoolExecutor`; the program's end cancels the queue."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._count = count
        self._lock = threading.Lock()
        self._busy = 0  # jobs that the executor has
        self._queue = deque[tuple[Future[Any], Job]]()
        self._closed = False

    def submit(self, work: Callable[..., Result], *args: object) -> "Future[Result]":
        """Have a thread do it at its turn. After the end it is cancelled."""
        future: Future[Result] = Future()
        with self._lock:
            self._queue.append((future, partial(_run_job, future, partial(work, *args))))
        self._start_jobs()
        return future

    def close(self) -> None:
        """Cancel the queue; jobs that have begun end by themselves."""
        self._pool.shutdown(wait=False)
        with self._lock:
            self._closed = True
        self._start_jobs()

    def _start_jobs(self, ended: int = 0) -> None:
        """Begin as many jobs as there are free threads; `ended` jobs have ended."""
        cancelled = list[Future[Any]]()
        with self._lock:
            self._busy -= ended
            while self._queue and self._busy < self._count and not self._closed:
                future, job = self._queue.popleft()
                try:
                    self._pool.submit(self._run, job)
                except RuntimeError:  # the program ends, or it is being closed
                    self._closed = True
                    cancelled.append(future)
                else:
                    self._busy += 1
            if self._closed:
                cancelled += [future for future, _ in self._queue]
                self._queue.clear()
        for future in cancelled:
            future.cancel()
            future.set_running_or_notify_cancel()  # wakes threads in `wait`, too

    def _run(self, job: Job) -> None:
        job()
        self._start_jobs(ended=1)


def _run_job(future: "Future[Result]", work: Callable[[], Result]) -> None:
    """As an executor does a job, unless it was cancelled meanwhile."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # the waiter gets it, of whatever type it is
        future.set_exception(error)
    else:
        future.set_result(result)
