"""The state of an engine, or of several, as last reported to an API server."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import NO_TOTALS, sum_totals

QUIET_SECONDS: Final = 2.0  # without a message of the engine: then it may hang


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
    now: float, last: Snapshot, quiet_seconds: float, *, ready: bool
) -> Snapshot:
    """Returns the snapshot of an engine that sent `last`, and nothing for `quiet_seconds`
    in which requests were served.
    """
    stalled = max(last.stalled, quiet_seconds if quiet_seconds > QUIET_SECONDS else 0.0)
    return evolve(
        last,
        time=now,
        dead="",  # another engine will follow
        # An engine that is starting does not stall: it reports its progress.
        failing=last.failing if ready else 0,
        stalled=stalled if ready else 0.0,
    )


def summed_snapshot(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Returns the state of one engine or more together.

    They stall, or fail, only if all do: else some go on serving. Each of them reports the
    counts of all API servers, but a new engine lacks those of API servers' processes that
    ended before it began: the largest are right.
    """
    waiting_for = Counter[str]()
    for snapshot in snapshots:
        waiting_for.update(snapshot.waiting_for)
    journals_writing = [
        snapshot.journal_writing
        for snapshot in snapshots
        if snapshot.journal_writing is not None
    ]
    running = {name for each in snapshots for name in each.running_adapters}
    waiting = {name for each in snapshots for name in each.waiting_adapters}
    return evolve(
        snapshots[0],
        draining=all(snapshot.draining for snapshot in snapshots),
        running=sum(snapshot.running for snapshot in snapshots),
        requests=sum(snapshot.requests for snapshot in snapshots),
        waiting=sum(snapshot.waiting for snapshot in snapshots),
        waiting_for=dict(waiting_for),
        blocks=sum(snapshot.blocks for snapshot in snapshots),
        blocks_free=sum(snapshot.blocks_free for snapshot in snapshots),
        blocks_cached=sum(snapshot.blocks_cached for snapshot in snapshots),
        stalled=min(snapshot.stalled for snapshot in snapshots),
        failing=min(snapshot.failing for snapshot in snapshots),
        totals=sum_totals([snapshot.totals for snapshot in snapshots]),
        journal_writing=all(journals_writing) if journals_writing else None,
        journal_errors=sum(snapshot.journal_errors for snapshot in snapshots),
        running_adapters=tuple(sorted(running)),
        waiting_adapters=tuple(sorted(waiting - running)),
        api_servers=max(
            (snapshot.api_servers for snapshot in snapshots),
            key=lambda totals: sum(totals.counts.values()),
        ),
    )
