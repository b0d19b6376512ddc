"""The heartbeat of a process, as its watcher sees it.

    engine:      beat, some times a second, while its steps end (`engine_server.py`)
    API server:  beat, likewise, while its event loop runs (`api_server_process.py`)
    watcher:     hangs? at each look; then it is killed, and started again

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

# Times the limit: how long a process that loads may hold its interpreter.
LOADING_FACTOR: Final = 10
STOPPED_SECONDS: Final = 8.0  # seconds of silence of a stopped process
HEARTBEAT_BYTES: Final = 1  # bytes of shared memory
_MAX_GAP_SECONDS: Final = 2.0  # seconds at most that one look to the next counts for
_COUNTS: Final = 256


class Heartbeat:
    """A count of heartbeats, in memory that a process and its watcher share: with forks
    of the process that makes it, or with all that map `file`.
    """

    def __init__(self, file: int = -1) -> None:
        self._memory = mmap.mmap(file, HEARTBEAT_BYTES)

    @property
    def count(self) -> int:
        """The number of heartbeats, modulo 256."""
        return self._memory[0]

    def beat(self) -> None:
        """Count a heartbeat of this process."""
        self._memory[0] = (self._memory[0] + 1) % _COUNTS


class Watch:
    """Whether a process is silent for too long; without a `limit` in seconds, it never
    is.
    """

    def __init__(self, heartbeat: Heartbeat, limit: float, process: int) -> None:
        """`process`: its id."""
        self._heartbeat = heartbeat
        self._limit = limit
        self._process = process
        self._seen = 0
        self._silent = 0.0  # seconds
        self._looked: float | None = None  # when
        self._hung = False

    def hangs(self, now: float, *, ready: bool) -> bool:
        """Read the count; whether it has been silent for too long. That is reported once,
        as a process that is killed then may take a while to end.
        """
        count, looked = self._heartbeat.count, self._looked
        self._looked = now
        if count != self._seen or looked is None:
            self._seen = count
            self._silent = 0.0
            return False
        self._silent += min(now - looked, _MAX_GAP_SECONDS)
        limit = self._limit if ready else LOADING_FACTOR * self._limit
        if self._silent >= STOPPED_SECONDS and is_stopped(self._process):
            limit = min(limit, STOPPED_SECONDS)
        if self._hung or not 0 < limit <= self._silent:
            return False
        self._hung = True
        return True


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not say."""
    with suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
        return stat.rpartition(") ")[2].startswith("T")
    return False
