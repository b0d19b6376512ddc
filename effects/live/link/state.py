"""How an engine is, as a front was told some moments ago."""

from typing import Final

from attrs import evolve

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import NOTHING_COUNTED

QUIET: Final = 2.0  # seconds without a word of the engine, after which it may be stuck


def unknown(now: float, requests: int) -> Snapshot:
    """The snapshot of an engine that has not said anything yet."""
    return Snapshot(
        time=now,
        dead="",
        draining=False,
        requests=requests,
        running=0,
        waiting=0,
        waiting_for={},
        blocks=1,
        blocks_free=1,
        blocks_cached=0,
        resets=0,
        stalled=0.0,
        failing=0,
        totals=NOTHING_COUNTED,
    )


def known(now: float, told: Snapshot, quiet: float, *, ready: bool) -> Snapshot:
    """The snapshot of an engine that `told` how it is, and nothing for `quiet` seconds in
    which somebody was served.
    """
    stalled = max(told.stalled, quiet if quiet > QUIET else 0.0)
    return evolve(
        told,
        time=now,
        dead="",  # then there will be another one
        # One that is being started does not stall: it says what it does.
        failing=told.failing if ready else 0,
        stalled=stalled if ready else 0.0,
    )
