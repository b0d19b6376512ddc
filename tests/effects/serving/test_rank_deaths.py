"""`minfer serve` with an engine of two ranks, either of which is killed or stopped while
streams run: no request is lost, and none of the old ranks is left.
"""

import asyncio
import signal
import time
from typing import Final

import pytest

from tests.circles import claimed, long
from tests.effects.serving.process_deaths import Load, bodies, server

OPTIONS: Final = (
    "--device=cpu",
    "--dtype=float32",
    "--num-gpu-blocks-override=128",
    "--tensor-parallel-size=2",
)
KILLS: Final = [(0, signal.SIGKILL), (1, signal.SIGKILL)]
STOPS: Final = [(1, signal.SIGSTOP), (0, signal.SIGSTOP)]


@pytest.mark.parametrize(
    "losses",
    [*long([KILLS]), *claimed([STOPS])],
    ids=["kills", "stops"],
)
def test_lost_ranks_lose_no_request(losses: list[tuple[int, signal.Signals]]) -> None:
    with server(*OPTIONS) as served:
        served.drain()
        load = Load(served.url, bodies(1, 150))

        async def run() -> None:
            await served.until_ready()
            assert len(served.ranks()) == 2
            await load.learn()
            async with load.clients():
                for rank, signal_number in losses:
                    await load.flows(time.monotonic())
                    await served.lose(rank, signal_number)
                    await load.flows(time.monotonic())

        asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []
    assert load.flawed() == []
