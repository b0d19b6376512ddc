"""Waiting for what happens in other threads and processes."""

import asyncio
import time
from collections.abc import Callable


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
