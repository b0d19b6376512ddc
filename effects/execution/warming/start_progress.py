"""Progress of an executor's start.

It is reported, and logged as information by the logger `START`: a server shows that, and
a library only where its user asks for it.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from attrs import frozen

WEIGHTS: Final = "loading weights"
KERNELS: Final = "compiling kernels"
GRAPHS: Final = "capturing graphs"


@frozen
class StartProgress:
    """A stage, and how much of it is done."""

    stage: str  # one of the above, or an executor's own
    done: int
    total: int  # 0: unknown


Report = Callable[[StartProgress], None]


START: Final = "minfer.start"
log: Final = logging.getLogger(START)


def logged(report: Report) -> Report:
    """Returns a report that also logs the begin and the end of each stage."""
    begin_times: dict[str, float] = {}  # stages, and when

    def note(progress: StartProgress) -> None:
        stage, now = progress.stage, time.monotonic()
        if stage not in begin_times:
            begin_times[stage] = now
            log.info("%s", stage)
        elif progress.done == progress.total:
            log.info("%s: done in %.1f s", stage, now - begin_times[stage])
        report(progress)

    return note


def ignore_progress(_: StartProgress) -> None:
    """Do nothing."""
