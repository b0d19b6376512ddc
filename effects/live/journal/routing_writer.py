"""Writes the journal of a front's router: `DIR/RUN-front-0.routing`, one file.

Its lines are those of `minfer.runs.routing_journal`, which replays them. They are kept
until there are some, and written by a thread of their own, as a front has one loop for
all its requests. Where the file cannot be written, or is as large as it may be, nothing
more is recorded, and the log says so: a front never stops for its journal.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Final

import minfer
from minfer.effects.live.journal.journal_files import create, write_all
from minfer.routing.messages import RouterEvent, RoutingRequest
from minfer.routing.router import Applied, Routed
from minfer.routing.state import RouterConfig
from minfer.runs.routing_journal import RoutingWriter

SUFFIX: Final = ".routing"
_log = logging.getLogger("minfer.journal")


class RoutingJournalWriter:
    """Records one router. Its methods belong to one thread."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        """`size` is the most bytes of the file."""
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = folder / f"{began}-{os.getpid()}-{name}{SUFFIX}"
        self._name = name
        self._left = size
        self._lines: RoutingWriter | None = None
        self._due: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # that writes

    def begin(self, config: RouterConfig) -> None:
        """Open the file; to be called once."""
        lines = RoutingWriter(config, {"minfer": minfer.__version__, "of": self._name})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = create(self.path)
        except OSError as error:
            _log.warning("%s: routing is not recorded: %s", self.path, error)
            return
        self._lines = lines
        self._thread = threading.Thread(
            target=self._write, args=(file,), name="minfer-routing", daemon=True
        )
        self._thread.start()
        self._put(lines.head())

    def applied(self, events: tuple[RouterEvent, ...], result: Applied) -> None:
        """Record events."""
        if self._lines is not None:
            self._put(self._lines.applied(events, result))

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Record a decision."""
        if self._lines is not None:
            self._put(self._lines.routed(request, result))

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
            self._thread = None

    def _put(self, line: bytes) -> None:
        self._left -= len(line)
        if self._left < 0:
            _log.warning("%s is full: routing is not recorded any more", self.path)
            self._lines = None
            return
        self._due.put(line)

    def _write(self, file: int) -> None:
        try:
            while (line := self._due.get()) is not None:
                write_all(file, line)
        except OSError as error:
            _log.warning("%s: routing is not recorded any more: %s", self.path, error)
            self._lines = None
            while self._due.get() is not None:
                pass
        finally:
            with contextlib.suppress(OSError):
                os.close(file)
