"""Detection of masks in a call that take longer than MASK_WAIT_SECONDS.

Theory. The library makes the masks of a step in one call, on all processors, and does not
report how long each took. But it writes each line once its mask is there: so a thread
checks every MASK_WAIT_SECONDS which lines were not written yet. While no more lines are
left than there are processors, each of them is being made; so those that are left at the
next check, too, take that long. Before that, lines may only have waited for a processor.

The thread ends when there were no calls for a while.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import cpu_count
from typing import Final

from attrs import define

from minfer.effects.text.grammars.grammar_library import MASK_WAIT_SECONDS
from minfer.effects.text.grammars.mask_lines import Lines

UNWRITTEN: Final = 0x5A5AA5A5  # the first word of a line whose mask is not there yet
# Threads that make masks: a processor in five is left to others, as the library does.
MASK_THREADS: Final = max(1, min(32, (cpu_count() or 1) * 4 // 5))
MAX_IDLE_CHECKS: Final = 200  # without a call; then the thread ends


@define(eq=False)
class WatchedCall:
    """The masks of a step, while they are made."""

    lines: Lines
    unwritten: Sequence[int]  # lines that were not written at the last check
    was_checked: bool = False
    slow: frozenset[int] = frozenset()

    def check_lines(self) -> None:
        """Note which lines were written since the last check."""
        all_started = self.was_checked and len(self.unwritten) <= MASK_THREADS
        self.was_checked = True
        self.unwritten = [
            line for line in self.unwritten if self.lines[line, 0] == UNWRITTEN
        ]
        if all_started:
            self.slow |= frozenset(self.unwritten)


class MaskWatch:
    """Watches calls, one at a time."""

    def __init__(self) -> None:
        self._call: WatchedCall | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, lines: Lines, line_numbers: Sequence[int]) -> Iterator[WatchedCall]:
        """Watch a call while it writes the lines of these numbers."""
        lines[line_numbers, 0] = UNWRITTEN
        call = self._call = WatchedCall(lines, line_numbers)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="minfer-late-masks", daemon=True
            )
            self._thread.start()
        try:
            yield call
        finally:
            self._call = None

    def _run(self) -> None:
        quiet = 0
        while quiet < MAX_IDLE_CHECKS:
            time.sleep(MASK_WAIT_SECONDS)
            call = self._call
            quiet = quiet + 1 if call is None else 0
            if call is not None:
                call.check_lines()
