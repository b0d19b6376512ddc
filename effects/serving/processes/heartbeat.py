"""The heartbeat of the engine's process, as its watcher sees it.

    engine:   beat, some times a second, while its steps end (`live/link/host.py`)
    watcher:  hangs? at each look; then it is killed, and started again as after a death

Theory. A process that hangs still exists: it is stopped, in a call of its device that
never returns, or in a lock. So it has to send a heartbeat, and silence means a hang. The
heartbeat is a count in shared memory: it costs nothing, never blocks, and cannot fill up.
Silence is counted only while the watcher itself runs: if all processes were stopped
together, or the machine was, no process has hung.
"""

import mmap
from typing import Final

LOADING: Final = 10  # times the limit: how long one that loads may hold its interpreter
_GAP: Final = 2.0  # seconds at most that one look to the next counts for
_COUNTS: Final = 256


class Heartbeat:
    """The heartbeats of successive processes; without a `limit` in seconds, none of them
    ever hangs.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._count = mmap.mmap(-1, 1)  # shared with processes that are forked
        self._seen = 0
        self._silent = 0.0  # seconds
        self._looked: float | None = None  # when

    def beat(self) -> None:
        """Count a heartbeat of this process."""
        self._count[0] = (self._count[0] + 1) % _COUNTS

    def begin(self) -> None:
        """Restart the count: a process starts, or is about to end."""
        self._silent = 0.0
        self._looked = None

    def hangs(self, now: float, *, ready: bool) -> bool:
        """Read the count; whether it has been silent for too long."""
        count, looked = self._count[0], self._looked
        self._looked = now
        if count != self._seen or looked is None:
            self._seen = count
            self._silent = 0.0
            return False
        self._silent += min(now - looked, _GAP)
        most = self.limit if ready else LOADING * self.limit
        return 0 < most <= self._silent
