"""How engines have ended, for the fronts: in memory that all processes of a server share.

An engine that is killed may have been killed from outside, or because it hung, so a
request that it served alone then is not the cause for sure. A crash is the engine's own.
"""

import mmap
import signal
from typing import Final

# Signals of the faults of a process itself.
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
