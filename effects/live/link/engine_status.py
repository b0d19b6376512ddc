"""An engine's state, as last reported to a front."""

from typing import Final

from attrs import evolve

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import NO_TOTALS

QUIET: Final = 2.0  # seconds without a message of the engine, after which it may hang


def unknown_snapshot(now: float, requests: int) -> Snapshot:
    """Returns the snapshot of an engine that has not sent any yet."""
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
        totals=NO_TOTALS,
    )


def reported_snapshot(
    now: float, last: Snapshot, quiet: float, *, ready: bool
) -> Snapshot:
    """Returns the snapshot of an engine that sent `last`, and nothing for `quiet` seconds
    in which requests were served.
    """
    stalled = max(last.stalled, quiet if quiet > QUIET else 0.0)
    return evolve(
        last,
        time=now,
        dead="",  # another engine will follow
        # An engine that is starting does not stall: it reports its progress.
        failing=last.failing if ready else 0,
        stalled=stalled if ready else 0.0,
    )
