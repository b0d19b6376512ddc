"""A few threads for a line of jobs that a program which ends does not wait for.

Theory. `ThreadPoolExecutor` keeps what is submitted in a line of its own, and at the end
of the program works that off before it lets go. Here the line is ours, and the executor
has no more jobs than threads: the next one is submitted by the job that ends. When the
program ends that is refused, and all who are in line are cancelled; so it waits for what
has begun, and for nothing else.
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
# For what is slow: the driver, and what the library does at once, need the rest.
FOR_SLOW: Final = max(1, min(8, (cpu_count() or 1) // 2))


class Threads:
    """What is used here of a `ThreadPoolExecutor`; the program's end cancels the line."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._count = count
        self._lock = threading.Lock()
        self._busy = 0  # jobs that the executor has
        self._line = deque[tuple[Future[Any], Job]]()
        self._closed = False

    def submit(self, work: Callable[..., Result], *args: object) -> "Future[Result]":
        """Have a thread do it when its turn comes. After the end it is cancelled."""
        done: Future[Result] = Future()
        with self._lock:
            self._line.append((done, partial(_do, done, partial(work, *args))))
        self._go_on()
        return done

    def close(self) -> None:
        """Cancel what is in line; what has begun ends by itself."""
        self._pool.shutdown(wait=False)
        with self._lock:
            self._closed = True
        self._go_on()

    def _go_on(self, ended: int = 0) -> None:
        """Begin what there are threads for; `ended` jobs have."""
        left = list[Future[Any]]()
        with self._lock:
            self._busy -= ended
            while self._line and self._busy < self._count and not self._closed:
                done, job = self._line.popleft()
                try:
                    self._pool.submit(self._run, job)
                except RuntimeError:  # the program ends, or it is being closed
                    self._closed = True
                    left.append(done)
                else:
                    self._busy += 1
            if self._closed:
                left += [done for done, _ in self._line]
                self._line.clear()
        for done in left:
            done.cancel()
            done.set_running_or_notify_cancel()  # for those in `wait`, who hear no less

    def _run(self, job: Job) -> None:
        job()
        self._go_on(ended=1)


def _do(done: "Future[Result]", work: Callable[[], Result]) -> None:
    """As an executor does a job, unless it was cancelled meanwhile."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # the waiter gets it, of whatever type it is
        done.set_exception(error)
    else:
        done.set_result(result)
