"""Numbers of a run whose requests are known."""

from typing import Any

import numpy as np
import pytest

from minfer.effects.runs.load.load_client import Outcome
from minfer.effects.runs.load.load_metrics import Metrics, meets, metrics_of, warnings
from minfer.effects.runs.load.request_record import (
    INTERRUPTED,
    RequestFailure,
    RequestRecord,
)

ANSWERED = [
    RequestRecord(
        number=i,
        due=i,
        sent=i + 0.001,
        ended=i + 1.5,
        events=(i + 0.5, i + 1.0, i + 1.5),
        prompt_tokens=10,
        output_tokens=5,
    )
    for i in range(8)
]
FAILED = [
    RequestRecord(8, 1, 1, 2, failure=RequestFailure("HTTP 503", "full")),
    RequestRecord(9, 1, 1, 2, failure=RequestFailure("timed out", "late")),
    RequestRecord(10, 1, 1, 2, failure=RequestFailure("HTTP 503", "still full")),
]
STOPPED = RequestRecord(
    11, 8, 8, 9, events=(8.5,), output_tokens=1, failure=RequestFailure(INTERRUPTED, "")
)


def metrics(*more: RequestRecord, **goals: float) -> Metrics:
    return metrics_of(Outcome([*ANSWERED, *more], 10.0, [0.25]), goals, (50, 99))


def test_rates_are_over_the_whole_run() -> None:
    found = metrics()
    assert (found["completed"], found["failed"], found["interrupted"]) == (8, 0, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (80, 40)
    assert found["request_throughput"] == 0.8
    assert found["output_throughput"] == 4
    assert found["total_token_throughput"] == 12
    assert found["max_concurrent_requests"] == 2  # each takes 1.5 s, one a second
    assert "request_goodput" not in found


def test_latencies_are_in_milliseconds() -> None:
    found = metrics()
    for name, value in (("ttft", 499), ("tpot", 250), ("itl", 500), ("e2el", 1499)):
        for which in ("mean", "median", "p50", "p99"):
            assert found[f"{which}_{name}_ms"] == pytest.approx(value), name
        assert found[f"std_{name}_ms"] == pytest.approx(0, abs=1e-9)
    assert found["p99_sent_late_ms"] == pytest.approx(1)


def test_percentiles_are_numpys() -> None:
    times = [0.1, 0.2, 0.7, 1.9]
    records = [RequestRecord(i, 0, 0, t, events=(t,)) for i, t in enumerate(times)]
    found = metrics_of(Outcome(records, 2.0, []), {}, (90, 99.9))
    assert found["p90_ttft_ms"] == pytest.approx(1000 * np.percentile(times, 90))
    assert found["p99.9_ttft_ms"] == pytest.approx(1000 * np.percentile(times, 99.9))
    assert found["mean_tpot_ms"] is found["p90_itl_ms"] is None


def test_failures_are_shown_by_kind_and_are_in_no_latency() -> None:
    found = metrics(*FAILED)
    assert (found["completed"], found["failed"]) == (8, 3)
    assert found["failures"] == {
        "HTTP 503": {"requests": 2, "first": "full"},
        "timed out": {"requests": 1, "first": "late"},
    }
    assert found["mean_e2el_ms"] == pytest.approx(1499)


def test_an_interrupted_request_is_no_failure_but_had_tokens() -> None:
    found = metrics(STOPPED, ttft=1000)
    assert (found["failed"], found["interrupted"], found["completed"]) == (0, 1, 8)
    assert found["total_output_tokens"] == 41
    assert found["mean_ttft_ms"] == pytest.approx(499)
    assert found["request_goodput"] == 0.8


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 499.1}, 8),
        ({"ttft": 498.9}, 0),
        ({"ttft": 600, "tpot": 249}, 0),
        ({"tpot": 251, "e2el": 1500}, 8),
        ({"e2el": 1498}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_goals(
    goals: dict[str, float], good: int
) -> None:
    assert metrics(*FAILED, **goals)["request_goodput"] == good / 10


def test_one_token_meets_any_pace_and_a_failure_meets_none() -> None:
    one = RequestRecord(0, 0, 0, 1, events=(1.0,), output_tokens=1)
    assert meets(one, {"tpot": 1})
    assert not meets(FAILED[0], {})


def test_a_run_without_an_answer_has_numbers() -> None:
    found = metrics_of(Outcome(FAILED, 0.0, []), {"ttft": 1})
    assert found["request_throughput"] == found["request_goodput"] == 0
    assert found["mean_ttft_ms"] is None
    assert metrics_of(Outcome([], 0.0, []))["max_concurrent_requests"] == 0


def doubts(
    cpu: float = 0.1,
    late: float = 0.0,
    seconds: float = 5.0,
    paced: bool = True,
    **more: Any,
) -> str:
    records = [RequestRecord(i, 0, late, late + 1, **more) for i in range(4)]
    found = metrics_of(Outcome(records, seconds, [0.1, cpu]))
    return " ".join(warnings(found, paced=paced))


def test_doubtful_numbers_are_named() -> None:
    assert doubts() == ""
    assert doubts(cpu=0.79) == ""
    assert "the client used 81% of a core" in doubts(cpu=0.81)
    assert "more than 20 ms late" in doubts(late=0.02)
    assert "the server sends no usage" in doubts(counted=True)
    assert doubts(late=1.0, paced=False) == ""  # it waited for its turn
    assert doubts(cpu=1.0, seconds=0.5) == ""  # starting is a large part of it
