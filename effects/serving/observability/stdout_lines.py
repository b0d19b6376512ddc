"""Lines for standard output, written by a thread, so that no answer waits for a pipe.

The thread formats the lines, too. The buffer is bounded: if a pipe is not read, the
latest lines are dropped, and their number is reported.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_WAITING_LINES: Final = 10_000  # lines that wait
GATHER_SECONDS: Final = 0.1  # lines of this time are written together
# Several processes can write this much to a pipe without mixing.
_ATOMIC_WRITE_BYTES: Final = 4096
_CLOSE_SECONDS: Final = 2.0  # that the last lines may take

MakeLine = Callable[[], str]


class LineWriter:
    """Writes to a file descriptor, once `begin` returns true."""

    def __init__(self, file: int = 1, begin: Callable[[], bool] = lambda: True) -> None:
        self._file = file
        self._begin = begin
        self._waiting: deque[MakeLine] = deque()
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minfer-lines")
        self._thread.daemon = True
        self._thread.start()

    def put(self, line: MakeLine) -> None:
        """Have a line formatted and written, soon."""
        if len(self._waiting) < MAX_WAITING_LINES:
            self._waiting.append(line)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write the remaining lines, if that does not take long."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            closing = False
            while not closing:
                closing = self._closing.wait(GATHER_SECONDS)
                if closing or self._begin():
                    self._write_all()

    def _write_all(self) -> None:
        """Write the lines that wait, joined up to the size that does not mix."""
        chunk = b""
        for _ in range(len(self._waiting)):
            line = self._waiting.popleft()().encode("utf-8", "replace") + b"\n"
            if len(chunk) + len(line) > _ATOMIC_WRITE_BYTES:
                self._write(chunk)
                chunk = b""
            chunk += line
        if self._dropped:
            chunk += f"minfer: {self._dropped} lines were dropped\n".encode()
            self._dropped = 0
        self._write(chunk)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
