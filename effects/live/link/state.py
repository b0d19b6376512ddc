"""How an engine is, as a front was told some moments ago."""

from typing import Final

from minfer.effects.live.client import Snapshot
from minfer.effects.live.link import messages as wire
from minfer.effects.live.link.totals import from_wire
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


def known(now: float, state: wire.State, quiet: float, *, ready: bool) -> Snapshot:
    """The snapshot of an engine that said `state`, and nothing for `quiet` seconds in
    which somebody was served.
    """
    stalled = max(state.stalled, quiet if quiet > QUIET else 0.0)
    return Snapshot(
        time=now,
        dead="",
        draining=False,
        requests=state.requests,
        running=state.running,
        waiting=state.waiting,
        waiting_for=state.waiting_for,
        blocks=state.blocks,
        blocks_free=state.blocks_free,
        blocks_cached=state.blocks_cached,
        resets=state.resets,
        # One that is being started does not stall: it says what it does.
        failing=state.failing if ready else 0,
        stalled=stalled if ready else 0.0,
        totals=from_wire(state.totals),
        fronts=from_wire(state.fronts),
        journal_writing=state.journal_writing,
        journal_errors=state.journal_errors,
    )
