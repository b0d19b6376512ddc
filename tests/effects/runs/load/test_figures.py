"""Figures of a run whose requests are known."""

from typing import Any

import pytest

from minfer.effects.runs.load.figures import (
    Figures,
    figures_of,
    is_good,
    over_runs,
    read_goals,
    warnings,
)
from minfer.effects.runs.load.processes import Outcome
from minfer.effects.runs.load.record import INTERRUPTED, Failure, LoadError, Record

ANSWERED = [
    Record(
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
    Record(8, 1, 1, 2, failure=Failure("HTTP 503", "full")),
    Record(9, 1, 1, 2, failure=Failure("timed out", "late")),
    Record(10, 1, 1, 2, failure=Failure("HTTP 503", "still full")),
]
GIVEN_UP = Record(
    11, 8, 8, 9, events=(8.5,), output_tokens=1, failure=Failure(INTERRUPTED, "")
)


def figures(*more: Record, **goals: float) -> Figures:
    return figures_of(Outcome([*ANSWERED, *more], 10.0, (0.25, 0.5)), goals)


def test_rates_are_over_the_whole_run() -> None:
    found = figures()
    assert (found["requests"], found["completed"], found["failed"]) == (8, 8, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (80, 40)
    assert found["request_throughput"] == 0.8
    assert found["output_throughput"] == 4
    assert found["total_token_throughput"] == 12
    assert found["steady"]["output_throughput"] > 4
    assert "goodput" not in found


def test_latencies_are_in_milliseconds() -> None:
    found = figures()
    for name, mean in (("ttft", 499), ("tpot", 250), ("itl", 250), ("e2el", 1499)):
        assert found[f"{name}_ms"]["mean"] == pytest.approx(mean), name
        assert found[f"{name}_ms"]["p99"] == pytest.approx(mean), name
    assert found["event_gap_ms"]["median"] == pytest.approx(500)
    assert found["itl_ms"]["count"] == 32
    assert found["sent_late_ms"]["p99"] == pytest.approx(1)


def test_failures_are_told_by_kind_and_are_in_no_latency() -> None:
    found = figures(*FAILED)
    assert (found["requests"], found["completed"], found["failed"]) == (11, 8, 3)
    assert found["failures"] == {
        "HTTP 503": {"requests": 2, "first": "full"},
        "timed out": {"requests": 1, "first": "late"},
    }
    assert found["e2el_ms"]["count"] == 8


def test_who_was_given_up_is_no_failure_but_had_tokens() -> None:
    found = figures(GIVEN_UP, ttft=1000)
    assert (found["failed"], found["interrupted"], found["completed"]) == (0, 1, 8)
    assert found["total_output_tokens"] == 41
    assert found["ttft_ms"]["count"] == 8
    assert found["goodput"]["share"] == 1


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
def test_goodput_counts_who_keeps_to_all_goals(
    goals: dict[str, float], good: int
) -> None:
    found = figures(*FAILED, **goals)["goodput"]
    assert found["requests"] == good
    assert found["request_goodput"] == good / 10
    assert found["share"] == good / 11


def test_one_token_keeps_to_any_pace_and_a_failure_to_none() -> None:
    one = Record(0, 0, 0, 1, events=(1.0,), output_tokens=1)
    assert is_good(one, {"tpot": 1})
    assert not is_good(FAILED[0], {})


def test_goals_are_read() -> None:
    assert read_goals(["ttft:200", "tpot:0.5"]) == {"ttft": 200, "tpot": 0.5}
    for wrong in ("ttft", "ttft:", "itl:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(LoadError, match="is no goal; it is as in"):
            read_goals([wrong])


def test_a_run_without_an_answer_has_figures() -> None:
    found = figures_of(Outcome(FAILED, 0.0, ()), {"ttft": 1})
    assert found["request_throughput"] == 0
    assert found["ttft_ms"] is None
    assert figures_of(Outcome([], 0.0, ()), {})["requests"] == 0


def doubts(cpu: float = 0.1, late: float = 0.0, **told: Any) -> str:
    records = [Record(i, 0, late, late + 1, **told) for i in range(4)]
    found = figures_of(Outcome(records, 5.0, (0.1, cpu)), {})
    return " ".join(warnings(found, open_loop=True, lanes=None))


def test_doubtful_figures_are_told() -> None:
    assert doubts() == ""
    assert doubts(cpu=0.79) == ""
    assert "a client process used 81% of a core" in doubts(cpu=0.81)
    assert "more than 20 ms late" in doubts(late=0.02)
    assert "the server tells no usage" in doubts(counted=True)
    late = figures_of(Outcome([Record(0, 0, 1, 2)], 2.0, (0.1,)), {})
    assert warnings(late, open_loop=True, lanes=4) == []  # it waited for a lane
    short = figures_of(Outcome([Record(0, 0, 0, 0.5)], 0.5, (1.0,)), {})
    assert warnings(short, open_loop=False, lanes=4) == []
    lost = figures_of(Outcome([], 2.0, (0.1,), lost=1), {})
    assert warnings(lost, open_loop=False, lanes=4) == ["1 client processes died"]


def test_figures_over_runs() -> None:
    runs = [{"a": {"b": value}} for value in (3, 1, 2)]
    found = over_runs(runs, "a.b")
    assert found is not None
    assert (found.median, found.low, found.high) == (2, 1, 3)
    assert over_runs([*runs, {"a": None}], "a.b") is None
