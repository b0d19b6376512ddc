"""Loads of adapters while requests are served: few at once, each file once, in turns.

    begin(name) --> is under way: the same load
                --> failed a moment ago: the same error
                --> else a new load: `MAX_LOADS` run at once, and `MAX_UNFINISHED` run or
                    wait, at most half of them of one client; beyond that OverloadedError

They run in threads of their own: files are read and digests computed there.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from attrs import frozen

from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.live.errors import OverloadedError

MAX_LOADS: Final = 2  # at once
MAX_UNFINISHED: Final = 32  # loads that run or wait
FAILED_SECONDS: Final = 10.0  # in which a name that failed is not tried again
MAX_FAILURES: Final = 256  # that are remembered

LoadCall = Callable[[], AdapterEntry]


@frozen
class _Failure:
    error: Exception
    time: float


class AdapterLoads:
    """The loads of one process. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(MAX_LOADS, "minfer-adapters")
        # Reentrant: of a load that has ended already, the callback runs in `_submit`.
        self._lock = threading.RLock()
        self._unfinished: dict[str, Future[AdapterEntry]] = {}  # by name
        self._of_clients: Counter[str] = Counter()
        self._failures: dict[str, _Failure] = {}  # by name, the oldest first

    def begin(self, name: str, client: str, load: LoadCall) -> Future[AdapterEntry]:
        """Returns the load of an adapter on first use, which `load` does unless one of
        that name is under way. Raises OverloadedError, and again the error of a load that
        failed a moment ago.
        """
        with self._lock:
            if (unfinished := self._unfinished.get(name)) is not None:
                return unfinished
            failure = self._failures.get(name)
            if failure is not None and self._clock() < failure.time + FAILED_SECONDS:
                raise failure.error.with_traceback(None)
            return self._submit(name, client, load, on_first_use=True)

    def begin_new(self, name: str, client: str, load: LoadCall) -> Future[AdapterEntry]:
        """Returns a new load, whatever failed before: an administrator's. It may be of
        another folder than on first use, so that its error is not remembered. Raises
        OverloadedError, also if one of that name is under way.
        """
        with self._lock:
            if name in self._unfinished:
                message = f"the adapter {name!r} is being loaded; try again later"
                raise OverloadedError(message)
            return self._submit(name, client, load, on_first_use=False)

    def close(self) -> None:
        """Begin no more loads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, name: str, client: str, load: LoadCall, *, on_first_use: bool
    ) -> Future[AdapterEntry]:
        """Add a load; the caller holds the lock."""
        of_client = self._of_clients[client]
        if len(self._unfinished) >= MAX_UNFINISHED or of_client >= MAX_UNFINISHED // 2:
            raise OverloadedError("too many adapters are being loaded; try again later")
        self._of_clients[client] += 1
        begun = self._unfinished[name] = self._pool.submit(load)

        def note_end(ended: Future[AdapterEntry]) -> None:
            error = None if ended.cancelled() else ended.exception()
            self._note_end(name, client, error if on_first_use else None)

        begun.add_done_callback(note_end)
        return begun

    def _note_end(self, name: str, client: str, error: BaseException | None) -> None:
        """Note the end of a load, in its thread, and an error to remember."""
        with self._lock:
            self._unfinished.pop(name, None)
            self._of_clients[client] -= 1
            if not self._of_clients[client]:
                del self._of_clients[client]
            self._failures.pop(name, None)
            if isinstance(error, Exception):
                self._failures[name] = _Failure(error, self._clock())
                if len(self._failures) > MAX_FAILURES:
                    del self._failures[next(iter(self._failures))]
