"""What an API server says of its engine."""

import pytest
from attrs import evolve

from minfer.effects.cluster.engine_client.engine_status import (
    QUIET_SECONDS,
    reported_snapshot,
    unknown_snapshot,
)
from tests.effects.cluster.ends import IDLE

REPORTED = evolve(
    IDLE, time=1.0, requests=3, running=2, waiting=1, blocks_cached=2, failing=7
)
REPORTED = evolve(REPORTED, stalled=0.5, dead="ZeroDivisionError()")


@pytest.mark.parametrize(
    ("quiet", "ready", "stalled", "failing"),
    [
        (0.1, True, 0.5, 7),
        (QUIET_SECONDS + 3, True, QUIET_SECONDS + 3, 7),
        (99.0, False, 0.0, 0),
    ],
)
def test_an_engine_that_says_nothing_may_be_stuck_unless_it_is_being_started(
    quiet: float, ready: bool, stalled: float, failing: int
) -> None:
    snapshot = reported_snapshot(8.0, REPORTED, quiet, ready=ready)
    assert (snapshot.stalled, snapshot.failing) == (stalled, failing)
    assert (snapshot.time, snapshot.running, snapshot.blocks_cached) == (8.0, 2, 2)
    assert not snapshot.dead, "there will be another one"


def test_of_an_engine_without_messages_only_what_waits_for_it_is_known() -> None:
    snapshot = unknown_snapshot(2.0, 5)
    assert (snapshot.time, snapshot.requests, snapshot.running, snapshot.stalled) == (
        2.0,
        5,
        0,
        0.0,
    )
