"""Lines from a terminal: with line editing, and handling of Ctrl-C.

Ctrl-C while a line is typed drops the line, and a second one leaves; Ctrl-C while output
is written calls `stop`, and raises nothing.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

from minfer.effects.cli.standard_streams import print_message


class Keyboard:
    """A terminal's keyboard; `stop` is what Ctrl-C does while nothing is read."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._reading = False
        signal.signal(signal.SIGINT, self._interrupt)

    def lines(self) -> Iterator[str]:
        """Lines, with the terminal's line editing where there is one.

        Ends with the input; raises KeyboardInterrupt when Ctrl-C comes twice.
        """
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - from now on `input` has it
        interrupted = False
        while True:
            self._reading = True
            try:
                line = input("> " if sys.stdout.isatty() else "")
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if interrupted:
                    raise
                interrupted = True
                print_message("Ctrl-C again leaves, as Ctrl-D does")
            else:
                interrupted = False
                self._reading = False
                yield line

    def _interrupt(self, *_: object) -> None:
        if self._reading:
            raise KeyboardInterrupt
        self._stop()
