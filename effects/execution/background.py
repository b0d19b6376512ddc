"""Work for an executor's quiet moments, in a thread of its own.

Theory. An executor is quiet when no plan is on its way and none has come for a while:
between two turns of a busy engine it is not. Whoever launches takes the executor's lock,
so a request that comes while a piece of work is done waits for that piece, 15 ms, and no
longer. The thread ends with the work, with the executor, or with the main thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

QUIET: Final = 0.2  # seconds without a plan


class Background:
    """Does work piece by piece while its owner is quiet."""

    def __init__(
        self,
        work: Callable[[], bool],
        *,
        quiet: Callable[[], bool],
        lock: threading.Lock,
        wait: float | None = None,
    ) -> None:
        """`work` does a piece and says whether another remains; `quiet` says whether no
        plan is on its way. Both are called with the lock.
        """
        self.work = work
        self.quiet = quiet
        self.lock = lock
        self.wait = QUIET if wait is None else wait
        self.last = time.monotonic()  # when the owner was asked for something
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look for quiet moments, unless that has begun."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name="minfer-background")
            self.thread.start()

    def asked(self) -> None:
        """The owner has something to do."""
        self.last = time.monotonic()

    def close(self) -> None:
        """No piece is begun any more, and none is under way."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        left = self.wait
        while not self.ended.wait(left) and threading.main_thread().is_alive():
            left = self.last + self.wait - time.monotonic()
            if left > 0:
                continue
            left = 0.0
            with self.lock:
                if not self.quiet():
                    left = self.wait
                elif not self.work():
                    return
