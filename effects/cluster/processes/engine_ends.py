"""Whether engines crashed or were killed, for the fronts: in shared memory of a server's
processes.

After a crash (an exception, a fault such as SIGSEGV), a request that ran alone is the
cause. A kill may come from outside, or because the engine hung: the request is the cause
only after several of them (`quarantine`).
"""

import mmap
import signal
from typing import Final

# Signals that a process gets for faults of its own.
_FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
)


class EngineEnds:
    """Whether the last process of each engine has crashed."""

    def __init__(self, replicas: int) -> None:
        self._crashed = mmap.mmap(-1, replicas)

    def note(self, replica: int, code: int) -> None:
        """Note with which exit code, or by which signal (negative), an engine ended."""
        self._crashed[replica] = code > 0 or -code in _FAULTS

    def crashed(self, replica: int) -> bool:
        """Returns whether an engine's last process that has ended crashed."""
        return bool(self._crashed[replica])
