"""Limits of the calls of a policy under test, where the kit has a process of its own.

A call that takes too long is interrupted by a signal. One that cannot be interrupted, in
a function in C, ends with its process, see `minfer.testing.bounded`.
"""

import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from types import FrameType
from typing import Final

from attrs import define

CALL_SECONDS: Final = 2.0  # of CPU time, after which a call is interrupted
MAX_NAME: Final = 40  # bytes of a method's name
_RECORD: Final = struct.Struct(f"Q?{MAX_NAME}s")  # of the running call


class CallTooLongError(BaseException):
    """A call took too long. No Exception, so that a policy does not catch it."""


class CheckTooLongError(BaseException):
    """The whole check, with all calls, took too long."""


@define
class CallLimits:
    """The limits of the calls of this process; there are none before `begin`."""

    # Memory shared with the process that waits: it has the running call.
    board: mmap | None = None
    calls: int = 0  # so far

    def begin(self, board: mmap, seconds: float) -> None:
        """Limit the calls of this process from now on, and the process to `seconds` of
        CPU time, which on a busy machine take much longer.
        """
        self.board = board
        signal.signal(signal.SIGPROF, _interrupt)
        signal.signal(signal.SIGVTALRM, _end)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Limit a call of the method `name`. Raises CallTooLongError in it."""
        if self.board is None:
            yield
            return
        self.calls += 1
        board = self.board
        _RECORD.pack_into(board, 0, self.calls, True, name.encode()[:MAX_NAME])
        signal.setitimer(signal.ITIMER_PROF, CALL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            _RECORD.pack_into(board, 0, self.calls, False, name.encode()[:MAX_NAME])


@define(frozen=True)
class RunningCall:
    """A call as the process that waits sees it."""

    number: int
    running: bool
    name: str


def running_call(board: mmap) -> RunningCall:
    """The last call that another process began."""
    number, running, name = _RECORD.unpack_from(board, 0)
    return RunningCall(number, running, name.rstrip(b"\0").decode())


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise CallTooLongError(f"took more than {CALL_SECONDS:g} s of CPU time")


def _end(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise CheckTooLongError


limits: Final = CallLimits()
