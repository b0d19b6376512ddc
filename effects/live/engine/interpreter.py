"""Settings of the Python interpreter while an engine's loop runs."""

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Final

from attrs import define, field

SWITCH_SECONDS: Final = 5e-4


@define
class _Switching:
    """How many loops of this process shortened the interpreter's switch interval, which
    is global to the process.
    """

    loops: int = 0
    before: float = 0.0  # seconds: the interval without them
    lock: threading.Lock = field(factory=threading.Lock)


_switching: Final = _Switching()


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Have Python threads switch ten times as often while the loop runs: by default each
    of the loop's steps would wait 5 ms for every thread that computes.
    """
    with _switching.lock:
        if not _switching.loops:
            _switching.before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_SECONDS)
        _switching.loops += 1
    try:
        yield
    finally:
        with _switching.lock:
            _switching.loops -= 1
            if not _switching.loops:
                sys.setswitchinterval(_switching.before)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Disable automatic garbage collection while the loop runs; records cannot form
    cycles.

    A full collection over a large state stops the loop for tens of milliseconds.
    Reference counts free the garbage of a busy loop; the rest is collected when the
    engine is idle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
