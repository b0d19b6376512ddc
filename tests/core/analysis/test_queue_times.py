"""Waits of all requests at once, against the lives that are followed one by one."""

from collections import Counter

import pytest

from minfer.analysis.explain import explain
from minfer.analysis.queue_times import QueueFold, QueueTimes
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Submit
from minfer.records.state import Turn
from tests.core.recorded import recorded
from tests.core.simulation.clocked import Run, config, request


def times_of(engine: EngineConfig, turns: list[Turn]) -> dict[str, QueueTimes]:
    fold = QueueFold(engine)
    for turn in turns:
        fold.turn(turn)
    return dict(fold.end())


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 10])
def test_waits_are_those_of_lives(seed: int) -> None:
    """In hostile worlds, of requests whose steps did not fail: a life counts the time of
    these otherwise.
    """
    engine, turns = recorded(seed)
    turns = [*turns]
    submitted = Counter(
        event.request.id
        for turn in turns
        for event in turn.events
        if isinstance(event, Submit)
    )
    compared = 0
    for name, times in times_of(engine, turns).items():
        explanation = explain(engine, turns, name)
        parts = [
            (phase, spent)
            for life in explanation.lives
            for phase, spent in life.parts.items()
        ]
        failed = any(phase.kind == "failed" for phase, _ in parts)
        if failed or submitted[name] > 1:
            continue
        waited = sum(spent.seconds for phase, spent in parts if phase.kind == "line")
        assert times.waited == pytest.approx(waited, abs=1e-9), name
        assert times.preempted == sum(life.preempted for life in explanation.lives)
        ahead = [life.overtaking for life in explanation.lives]
        assert (times.admitted, times.later, times.preempted_for_later) == (
            sum(counts.admitted for counts in ahead),
            sum(counts.later for counts in ahead),
            sum(counts.preempted for counts in ahead),
        ), name
        compared += waited > 0
    assert compared


def test_causes_add_up() -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in "abc"))
    run.drain()
    times = times_of(run.config, run.turns)
    assert [times[name].waited for name in "abc"] == [0.0, 3.0, 6.0]
    assert set(times["c"].seconds) == {"rows"}
    assert (times["c"].admitted, times["c"].later) == (2, 0)


def test_later_requests_that_went_first_are_counted() -> None:
    """Also by a life."""
    run = Run(config(max_num_seqs=1, policy=Priority()))
    run.turn(Submit(request("patient", 5, tokens=30, priority=1)))
    for number in range(4):
        run.turn(Submit(request(f"urgent-{number}", 3, tokens=3)))
        run.turn()
        run.turn()
    run.drain()
    times = times_of(run.config, run.turns)["patient"]
    assert times.preempted == times.preempted_for_later
    assert times.preempted >= 1
    assert times.later == times.admitted == 4
    (life,) = explain(run.config, run.turns, "patient").lives
    overtaking = life.overtaking
    assert (overtaking.later, overtaking.admitted) == (4, 4)
    assert overtaking.latest == ("urgent-3", 0)
    assert overtaking.priorities == (0, 0)
    assert overtaking.preempted == times.preempted_for_later


def test_who_is_admitted_in_the_same_turn_but_after_it_did_not_go_first() -> None:
    """Two rows are free at once: the second one is for a request that came later."""
    run = Run(config(max_num_seqs=2, policy=Priority()))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in ("a", "b")))
    run.turn(*(Submit(request(name, 3, priority=1)) for name in ("own", "after")))
    run.drain()
    times = times_of(run.config, run.turns)["own"]
    (life,) = explain(run.config, run.turns, "own").lives
    assert times.waited > 0
    assert (times.later, times.admitted) == (0, 0)
    assert (life.overtaking.later, life.overtaking.admitted) == (0, 0)
    assert life.overtaking.priorities is None


def test_prompts_are_compared_with_the_last_ones() -> None:
    run = Run(config(num_blocks=256, max_num_batched_tokens=256))
    text = tuple(range(100, 140))
    run.turn(Submit(request("a", text, tokens=1)))
    run.drain()
    run.turn(Submit(request("b", (*text[:6], 7, *text[7:]), tokens=1)))
    run.turn(Submit(request("c", text[:20], tokens=1, root=b"another salt")))
    run.drain()
    times = times_of(run.config, run.turns)
    assert times["a"].edit is times["c"].edit is None
    assert times["b"].edit is not None
    assert (times["b"].edit.at, times["b"].edit.alike) == (6, 33)
    assert (times["b"].edit_with, times["b"].shared_with) == ("a", "a")
    assert (times["b"].prompt, times["b"].shared) == (40, 6)
