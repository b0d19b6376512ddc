"""Python's garbage collector, paused while a simulation runs.

Records cannot form cycles, so reference counts free all that a simulation drops, and a
collection finds nothing: with a host tier, whose indexes are large, collections took half
of the time. The setting is one of the process: the first simulation that runs pauses the
collector, and the last one that ends, or is closed, restores what was set before.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from attrs import define


@define
class _Pauses:
    """The simulations of this process that have paused the collector."""

    count: int = 0
    was_enabled: bool = False  # before the first


_pauses: Final = _Pauses()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Disable automatic garbage collection inside the block."""
    if not _pauses.count:
        _pauses.was_enabled = gc.isenabled()
        gc.disable()
    _pauses.count += 1
    try:
        yield
    finally:
        _pauses.count -= 1
        if not _pauses.count and _pauses.was_enabled:
            gc.enable()
