"""When things happened: what was waited for adds up to the time until admission."""

import pytest

from minfer.effects.text.timeline import Timeline
from minfer.records.messages import Admitted, Preempted

LET_IN = Admitted("a", 0, 0.0, 0, 1)
BACK = Preempted("a", 0, ("b", 0), 1, 1)


def test_queue_times_add_up() -> None:
    times = Timeline(arrived=1.0, waits_before={"rows": 5.0, "step": 1.0})
    times.record_scheduling(LET_IN, 4.0, {"rows": 6.5, "step": 1.25, "blocks": 0.0})
    assert times.started == 4.0
    # 1.5 s for rows; what is left was spent on steps, 0.25 s of it in line.
    assert times.queued == {"rows": 1.5, "step": 1.5}


def test_only_the_first_admission_counts_and_every_preemption() -> None:
    times = Timeline(arrived=1.0)
    times.record_scheduling(LET_IN, 2.0, {})
    times.record_scheduling(BACK, 3.0, {"rows": 9.0})
    times.record_scheduling(LET_IN, 5.0, {"rows": 9.0})
    times.record_scheduling(BACK, 6.0, {})
    assert (times.started, times.preempted) == (2.0, 2)
    assert times.queued == {"step": 1.0}


def test_who_is_let_in_at_once_waited_for_nothing() -> None:
    times = Timeline(arrived=2.0, waits_before={"rows": 3.0})
    times.record_scheduling(LET_IN, 2.0, {"rows": 3.0})
    assert times.queued == {}


def test_metrics_are_what_was_noted() -> None:
    times = Timeline(arrived=1.0)
    assert times.metrics(0).ttft is None
    times.record_scheduling(LET_IN, 2.0, {})
    for moment in (3.0, 4.0, 7.0):
        times.record_output(moment)
    reported = times.metrics(5)
    assert (reported.first_token_time, reported.last_token_time) == (3.0, 7.0)
    assert (reported.ttft, reported.latency) == (2.0, 6.0)
    assert reported.tpot == pytest.approx(1.0)
    assert reported.first_scheduled_time == 2.0
    assert reported.queue_times == {"step": 1.0}
    assert times.metrics(1).tpot is None
