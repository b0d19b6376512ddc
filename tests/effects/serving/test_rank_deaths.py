"""`minfer serve` with an engine of two ranks, either of which is killed or stopped while
streams run: no request is lost, and none of the old ranks is left.
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from tests.circles import claimed, long
from tests.effects.serving.process_deaths import (
    ENGINE,
    SOON,
    Load,
    Server,
    bodies,
    server,
)

OPTIONS: Final = (
    "--device=cpu",
    "--dtype=float32",
    "--num-gpu-blocks-override=128",
    "--tensor-parallel-size=2",
    "--engine-timeout=8",
)
DETECTED: Final = 15.0  # seconds until a stopped rank is gone: 10, and for its end
KILLS: Final = [(0, signal.SIGKILL), (1, signal.SIGKILL)]
STOPS: Final = [(1, signal.SIGSTOP), (0, signal.SIGSTOP)]


def parent_and_state(process: int) -> tuple[int, str]:
    """The parent of a process and its state; 0 and nothing once it has ended."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        state, parent = stat.rpartition(") ")[2].split()[:2]
        if state != "Z":
            return int(parent), state
    return 0, ""


def ranks_of(served: Server) -> list[int]:
    """The processes of the engine's ranks, rank 0 first."""
    engine = served.children()[ENGINE]
    every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [engine, *(one for one in every if parent_and_state(one)[0] == engine)]


async def are_gone(processes: list[int], limit: float) -> None:
    """Wait until all of them have ended."""
    async with asyncio.timeout(limit):
        while any(parent_and_state(one)[1] for one in processes):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "losses",
    [*long([KILLS]), *claimed([STOPS])],
    ids=["kills", "stops"],
)
def test_lost_ranks_lose_no_request(losses: list[tuple[int, signal.Signals]]) -> None:
    with server(*OPTIONS) as served:
        # Each death is described there: a pipe that nobody reads would fill.
        assert served.process.stderr is not None
        Thread(target=served.process.stderr.read, daemon=True).start()
        load = Load(served.url, bodies(1, 150))

        async def run() -> None:
            await served.until_ready()
            await load.learn()
            count = len(load.bodies)
            clients = [asyncio.create_task(load.client(i, count)) for i in range(count)]
            for rank, how in losses:
                await load.flows(time.monotonic())
                before = ranks_of(served)
                assert len(before) == 2
                os.kill(before[rank], how)
                await are_gone(before, DETECTED)
                await served.successor(ENGINE, before[0])
                await load.flows(time.monotonic())
            load.stopping = True
            await asyncio.wait_for(asyncio.gather(*clients), SOON)

        asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []
    assert load.flawed() == []
