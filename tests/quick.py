"""Bounds on processor time that hold on a busy machine, too."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOOP: Final = 200_000
LOOP_SECONDS: Final = 0.01  # of the loop below, on an idle machine


def _slowness() -> float:
    """How many times longer than on an idle machine Python takes here and now."""
    start = time.thread_time()
    total = 0
    for i in range(LOOP):
        total += i
    return max(1.0, (time.thread_time() - start) / LOOP_SECONDS)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the block takes more of this thread's processor time, as an idle machine
    counts it. Garbage of other tests is not collected meanwhile.
    """
    slowness = _slowness()
    gc.disable()
    try:
        start = time.thread_time()
        yield
        took = time.thread_time() - start
    finally:
        gc.enable()
    assert took <= seconds * max(slowness, _slowness())
