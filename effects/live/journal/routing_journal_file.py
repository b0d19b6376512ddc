"""The journal of a router: a file of its own, which `minfer replay` reads.

Its lines are those of `minfer.journal.routing_journal`, written by a thread of their own,
as an API server has one loop for all its requests. A router never stops for its journal:
if that cannot be written, or has reached its size, it ends there, which is logged, and
`recording` is false.
"""

import contextlib
import logging
import os
import threading
import time
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import minfer
from minfer.effects.live.journal.journal_files import SUFFIX as ENGINES
from minfer.effects.live.journal.journal_files import create, write_all
from minfer.journal.routing_journal import NAME, RoutingWriter
from minfer.routing.messages import RouterEvent, RoutingRequest
from minfer.routing.router import AppliedEvents, Routed
from minfer.routing.state import RouterConfig
from minfer.values.checks import ConfigError

SUFFIX: Final = ".routing"
PREFILL_SUFFIX: Final = "-prefill"  # of the names of routers among replicas that prefill
_MAX_FIRST_LINE_BYTES: Final = 2**16  # that are read
_log: Final = logging.getLogger("minfer.journal")


class RoutingJournalFile:
    """Records the turns of one router. Its methods belong to one thread."""

    def __init__(
        self, folder: Path, config: RouterConfig, size: int, name: str = "router"
    ) -> None:
        """`size` is the most bytes of the file; `name` is the router's. Raises
        ConfigError if the folder cannot be written.
        """
        self._left = size  # bytes
        header = {"minfer": minfer.__version__, "of": name}
        self._lines = RoutingWriter(config, header)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path, file = _create_file(folder, name)
        except OSError as error:
            reason = f"--journal {folder}: {error.strerror or error}"
            raise ConfigError(f"{reason}; name a folder that can be written") from None
        self.recording = True
        self._due = SimpleQueue[bytes | None]()
        self._thread = threading.Thread(
            target=self._write, args=(file,), name="minfer-routing", daemon=True
        )
        self._thread.start()
        self._put(self._lines.head())

    def applied(self, events: tuple[RouterEvent, ...], result: AppliedEvents) -> None:
        """Record events and what they led to."""
        if self.recording:
            self._put(self._lines.applied(events, result))

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Record a request and the decision about it."""
        if self.recording:
            self._put(self._lines.routed(request, result))

    def close(self) -> None:
        """Write what is left, and end the journal."""
        if self.recording:  # else it was cut short
            self._due.put(self._lines.end())
        self.recording = False
        self._due.put(None)
        self._thread.join()

    def _put(self, line: bytes) -> None:
        self._left -= len(line)
        if self._left < 0:
            self._end("it has the size that --journal-size allows")
            return
        self._due.put(line)

    def _end(self, reason: object) -> None:
        self.recording = False
        _log.warning("%s ends here: %s; requests are routed on", self.path, reason)

    def _write(self, file: int) -> None:
        try:
            while (line := self._due.get()) is not None:
                write_all(file, line)
        except OSError as error:
            self._end(error.strerror or error)
            while self._due.get() is not None:
                pass
        finally:
            with contextlib.suppress(OSError):
                os.close(file)


def routing_journals(path: Path) -> list[Path]:
    """Returns the journals of routers in a folder, in order, or the one in a file; none
    if it is another file, or the folder has journals of engines.
    """
    if path.is_dir():
        return [] if any(path.glob(f"*{ENGINES}")) else sorted(path.glob(f"*{SUFFIX}"))
    if not path.is_file():
        return []
    with path.open("rb") as file:
        head = file.readline(_MAX_FIRST_LINE_BYTES)
    return [path] if f'"{NAME}":'.encode() in head else []


def _create_file(folder: Path, name: str) -> tuple[Path, Any]:
    """Returns a file of a name that is not used, and its descriptor. Raises OSError."""
    run = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for number in count():
        path = folder / f"{run}-{os.getpid()}.{number}-{name}{SUFFIX}"
        try:
            return path, create(path)
        except FileExistsError:
            continue
    raise AssertionError("count() never ends")
