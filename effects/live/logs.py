"""Logs of the server's processes: on standard error, each line with its time and process.

Lines that any client on the network can cause are rate-limited, or a flood of garbage
fills the disk: of lines with the same text before its values are put in, a few are
written in each stretch of time, and the next one written reports how many were dropped.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from attrs import define, field

from minfer.effects.execution.warming.start_progress import START
from minfer.effects.live.load_log import LOAD

_LINE_FORMAT: Final = "%(asctime)s minfer {process} %(levelname)s %(name)s: %(message)s"
MAX_BURST_LINES: Final = 5  # equal lines in BURST_SECONDS
BURST_SECONDS: Final = 10.0
MAX_LINE_KINDS: Final = 1000  # that are counted; beyond them all counts are dropped


@define
class _LineCounts:
    """Equal lines: the time since which they are counted, and their number."""

    since: float
    written: int = 0
    dropped: int = 0


@define
class LogRateLimit(logging.Filter):
    """Drops all but a few lines of a kind in each stretch of time; never errors, and no
    lines of level DEBUG, which a user has asked for.
    """

    clock: Callable[[], float] = time.monotonic
    _counts: dict[tuple[str, str], _LineCounts] = field(factory=dict, init=False)

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line is written; adds the number of dropped lines to it."""
        if record.levelno >= logging.ERROR or record.levelno <= logging.DEBUG:
            return True
        now = self.clock()
        if len(self._counts) >= MAX_LINE_KINDS:
            self._counts.clear()
        counts = self._counts.setdefault((record.name, str(record.msg)), _LineCounts(now))
        if now - counts.since >= BURST_SECONDS:
            counts.since, counts.written = now, 0
        if counts.written >= MAX_BURST_LINES:
            counts.dropped += 1
            return False
        counts.written += 1
        if counts.dropped:
            text = record.getMessage()
            record.msg, record.args = f"{text} ({counts.dropped} more like it before)", ()
            counts.dropped = 0
        return True


_level = logging.WARNING  # of the server's processes


def set_level(name: str) -> None:
    """Have processes that are forked from here on log lines of this level and worse."""
    global _level
    _level = logging.getLevelNamesMapping()[name.upper()]


def configure_logs(process: str) -> None:
    """Log lines of the level that was set, by default warnings, and worse as this
    process; and how far the start is, and the load, from here on.
    """
    logging.basicConfig(
        level=_level, format=_LINE_FORMAT.format(process=process), force=True
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit())
    for name in (START, LOAD):
        logging.getLogger(name).setLevel(min(_level, logging.INFO))
