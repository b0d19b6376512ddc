"""Signals and words between a server's parent process and its children.

None of these signals is one that a terminal or a service manager may send to all
processes at once: those are for the parent, and children ignore them.
"""

import contextlib
import os
import signal
from typing import Final

DRAIN: Final = signal.SIGUSR1  # end once no requests run
STOP: Final = signal.SIGUSR2  # end now


def announce(pipe: int, word: bytes) -> None:
    """Write a word to the parent, which may have gone."""
    with contextlib.suppress(OSError):
        os.write(pipe, word)
