"""What happens in other threads and processes, and waiting for it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until a condition holds, which must not take long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


async def soon(condition: Callable[[], object], seconds: float = 10) -> None:
    """Likewise in an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def alive(process: int) -> bool:
    """Whether a process runs. One that has ended may wait to be asked for its code by
    whatever its parent is now.
    """
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
