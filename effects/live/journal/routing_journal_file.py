"""The journal of a running router: a file for each start, which `minfer replay` reads.

Each turn is written before its request is sent on, with one system call. A router never
stops for its journal: if that cannot be written, or has reached its size, it ends there,
which is logged, and `recording` is false.
"""

import logging
import os
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

import minfer
from minfer.effects.live.journal.journal_files import SUFFIX as ENGINES
from minfer.effects.live.journal.journal_files import create, write_all
from minfer.routing.messages import RouterEvent, RoutingRequest
from minfer.routing.router import Applied, Routed
from minfer.routing.state import RouterConfig
from minfer.runs.routing_journal import NAME, RoutingWriter
from minfer.values.checks import ConfigError

SUFFIX: Final = ".routing"
_HEAD: Final = 2**16  # bytes of a first line that are looked at
_log: Final = logging.getLogger("minfer.router")


class RoutingJournalFile:
    """Records the turns of one router. Raises ConfigError if the folder cannot be
    written.
    """

    def __init__(self, folder: Path, config: RouterConfig, size: int) -> None:
        self._left = size  # bytes
        self._writer = RoutingWriter(config, {"minfer": minfer.__version__})
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path, self._file = _fresh(folder)
        except OSError as error:
            what = f"--journal {folder}: {error.strerror or error}"
            raise ConfigError(f"{what}; name a folder that can be written") from None
        self.recording = True
        self._write(self._writer.head())

    def applied(self, events: tuple[RouterEvent, ...], result: Applied) -> None:
        """Write events and what they led to."""
        if self.recording:
            self._write(self._writer.applied(events, result))

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Write a request and the decision about it."""
        if self.recording:
            self._write(self._writer.routed(request, result))

    def close(self) -> None:
        """End the journal."""
        if self.recording:
            self.recording = False
            os.close(self._file)

    def _write(self, line: bytes) -> None:
        try:
            if len(line) > self._left:
                raise OSError("it has the size that --journal-size allows")  # noqa: TRY301 - as others
            write_all(self._file, line)
            self._left -= len(line)
        except OSError as error:
            self.close()
            why = error.strerror or error
            _log.warning("%s ends here: %s; requests are routed on", self.path, why)


def routing_journals(path: Path) -> list[Path]:
    """The journals of routers in a folder, in order, or the one in a file; none if it is
    another file, or the folder has journals of engines.
    """
    if path.is_dir():
        return [] if any(path.glob(f"*{ENGINES}")) else sorted(path.glob(f"*{SUFFIX}"))
    if not path.is_file():
        return []
    with path.open("rb") as file:
        head = file.readline(_HEAD)
    return [path] if f'"{NAME}":'.encode() in head else []


def _fresh(folder: Path) -> tuple[Path, Any]:
    """A file of a name that is not used, and its descriptor. Raises OSError."""
    run = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for number in count():
        path = folder / f"{run}-{os.getpid()}.{number}{SUFFIX}"
        try:
            return path, create(path)
        except FileExistsError:
            continue
    raise AssertionError("count() never ends")
