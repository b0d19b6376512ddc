"""The state of an engine, or of several, as last reported to a front."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import NO_TOTALS, sum_totals

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


def summed_snapshot(each: Sequence[Snapshot]) -> Snapshot:
    """Returns the state of one engine or more together.

    They stall, or fail, only if all do: else some go on serving. Each of them reports the
    counts of all fronts, but a new engine lacks those of fronts' processes that ended
    before it began: the largest are right.
    """
    waiting_for = Counter[str]()
    for one in each:
        waiting_for.update(one.waiting_for)
    written = [one.journal_writing for one in each if one.journal_writing is not None]
    return evolve(
        each[0],
        draining=all(one.draining for one in each),
        running=sum(one.running for one in each),
        requests=sum(one.requests for one in each),
        waiting=sum(one.waiting for one in each),
        waiting_for=dict(waiting_for),
        blocks=sum(one.blocks for one in each),
        blocks_free=sum(one.blocks_free for one in each),
        blocks_cached=sum(one.blocks_cached for one in each),
        stalled=min(one.stalled for one in each),
        failing=min(one.failing for one in each),
        totals=sum_totals([one.totals for one in each]),
        journal_writing=all(written) if written else None,
        journal_errors=sum(one.journal_errors for one in each),
        fronts=max((one.fronts for one in each), key=lambda it: sum(it.counts.values())),
    )
