"""Background work of an idle executor, in a thread of its own.

Theory. An executor is idle when no plan is in flight and none has been launched for
`QUIET_SECONDS`; between two turns of a busy engine it is not idle. Every launch takes the
executor's lock, so a request that arrives during a piece of work waits for that piece
only (15 ms). The thread ends with the work, with the executor, or with the main thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

QUIET_SECONDS: Final = 0.2  # seconds without a plan


class Background:
    """Does work piece by piece while its owner is idle."""

    def __init__(
        self,
        work: Callable[[], bool],
        *,
        quiet: Callable[[], bool],
        lock: threading.Lock,
        wait: float | None = None,
    ) -> None:
        """`work` does a piece and returns whether another remains; `quiet` returns
        whether no plan is in flight. Both are called with the lock held.
        """
        self.work = work
        self.quiet = quiet
        self.lock = lock
        self.wait = QUIET_SECONDS if wait is None else wait
        self.last_work = time.monotonic()  # when the owner last had work
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name="minfer-background")
            self.thread.start()

    def note_work(self) -> None:
        """Note that the owner has work."""
        self.last_work = time.monotonic()

    def close(self) -> None:
        """End the thread; waits for the piece that is being done."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        delay = self.wait
        while not self.ended.wait(delay) and threading.main_thread().is_alive():
            delay = self.last_work + self.wait - time.monotonic()
            if delay > 0:
                continue
            delay = 0.0
            with self.lock:
                if not self.quiet():
                    delay = self.wait
                elif not self.work():
                    return
