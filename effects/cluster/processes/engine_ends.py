"""How engines ended, for the API servers, which judge by it (`crash_rule`): in shared
memory of a server's processes.
"""

import mmap
import signal
from typing import Final

from minfer.effects.cluster.link.crash_rule import EndKind, EngineEnd
from minfer.effects.cluster.processes.oom_kills import oom_kills

# Signals that a process gets for faults of its own.
_FAULT_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
)
_MAX_ENDS: Final = 256  # the number of ends is one byte


class EngineEnds:
    """The last end of each engine. Its parent notes them, with the kernel's count of
    kills: one that rises between two ends of an engine is taken for a kill of that, also
    if the kernel has killed another process meanwhile.
    """

    def __init__(self, replicas: int) -> None:
        self._kinds = mmap.mmap(-1, replicas)
        self._numbers = mmap.mmap(-1, replicas)
        self._oom_kills = [oom_kills()] * replicas  # at the last end of each

    def note(self, replica: int, code: int, *, hung: bool = False) -> None:
        """Note with which exit code, or by which signal (negative), an engine ended;
        `hung`: its parent has killed it.
        """
        before, now = self._oom_kills[replica], oom_kills()
        self._oom_kills[replica] = now
        if code > 0 or -code in _FAULT_SIGNALS:
            kind = EndKind.CRASHED
        elif hung:
            kind = EndKind.HUNG
        elif code != -signal.SIGKILL:
            kind = EndKind.KILLED
        elif before is None or now is None:
            kind = EndKind.UNKNOWN
        else:
            kind = EndKind.OUT_OF_MEMORY if now > before else EndKind.KILLED
        self._kinds[replica] = kind.value
        self._numbers[replica] = (self._numbers[replica] + 1) % _MAX_ENDS

    def last(self, replica: int) -> EngineEnd:
        """Returns how an engine's last process ended that has ended."""
        return EngineEnd(EndKind(self._kinds[replica]), self._numbers[replica])
