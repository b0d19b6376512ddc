"""The heartbeat of a process, as its watcher sees it.

    engine:   beat, some times a second, while its steps end (`host.py`)
    front:    beat, likewise, while its event loop runs (`front_process.py`)
    watcher:  hangs? at each look; then it is killed, and started again as after a death

Theory. A process that hangs still exists: it is stopped, in a call of its device that
never returns, or in a lock. So it has to send a heartbeat, and silence means a hang. The
heartbeat is a count in shared memory: it costs nothing, never blocks, and cannot fill up.
Silence is counted only while the watcher itself runs: if all processes were stopped
together, or the machine was, no process has hung. A silent process that the system calls
stopped (SIGSTOP) is not in a long step, and has hung sooner.
"""

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Final

LOADING: Final = 10  # times the limit: how long one that loads may hold its interpreter
STOPPED: Final = 8.0  # seconds of silence of a stopped process
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
        self._process = 0  # whose it is

    def beat(self) -> None:
        """Count a heartbeat of this process."""
        self._count[0] = (self._count[0] + 1) % _COUNTS

    def begin(self, process: int = 0) -> None:
        """Restart the count: a process starts, or (0) is about to end."""
        self._process = process
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
        if self._silent >= STOPPED and is_stopped(self._process):
            most = min(most, STOPPED)
        return 0 < most <= self._silent


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not say."""
    with suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
        return stat.rpartition(") ")[2].startswith("T")
    return False
