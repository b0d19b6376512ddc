"""Who is let in, who has to wait and why, and who gives way."""

import math
from typing import Any

from attrs import evolve

from minfer.planning.admission import _load
from minfer.planning.admit import Admission, current_load
from minfer.planning.schedule import queue_blocked_by
from minfer.planning.step_builder import StepBuilder
from minfer.policies.builtin import Priority
from minfer.records.messages import (
    Execute,
    Pause,
    Preempted,
    QueueBlocked,
    Submit,
    WakeAt,
)
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Request
from tests.core.test_engine import CONFIG, Bench, ask


class Late(FirstCome):
    """Admits no request before a time."""

    def __init__(self, time: float) -> None:
        object.__setattr__(self, "time", time)

    def admit_from(self, state: Any, load: Load) -> float:
        del state, load
        return float(vars(self)["time"])


def test_a_policy_that_waits_is_woken_at_its_time_and_reported_once() -> None:
    bench = Bench(evolve(CONFIG, policy=Late(4.0)))
    assert bench.give(Submit(ask("a", 4, 2))).commands == (WakeAt(4.0),)
    assert bench.give().commands == (WakeAt(4.0),)
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("a", 0, "policy")]
    assert queue_blocked_by(bench.config, bench.state) == "policy"
    bench.give()
    turn = bench.give()
    assert [type(command) for command in turn.commands] == [Execute], (
        "at that time, not after it"
    )


def test_waiting_for_another_event_is_heeded_only_while_a_sample_runs() -> None:
    bench = Bench(evolve(CONFIG, policy=Late(math.inf)))
    bench.give(Submit(ask("a", 4, 3)))
    bench.turn(Submit(ask("b", 4, 3)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("b", 0, "policy")]
    assert not any(isinstance(c, WakeAt) for c in bench.turn().commands)
    bench.drain()
    assert set(bench.ended) == {("a", 0), ("b", 0)}


def test_who_waits_is_reported_again_when_the_cause_is_another() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=8, max_num_seqs=2))
    bench.give(Submit(ask("a", 6, 4)), Submit(ask("b", 6, 20)), Submit(ask("ccc", 28, 2)))
    causes = []
    while bench.state.waiting:
        causes.append(queue_blocked_by(bench.config, bench.state))
        bench.turn()
    assert causes == ["rows"] * 4 + ["blocks"] * 16
    assert [held.cause for held in bench.reasons_of(QueueBlocked)] == [
        "rows",
        "blocks",
    ], "each said once"
    bench.drain()


def test_who_was_displaced_is_in_no_plan_of_that_turn() -> None:
    config = evolve(CONFIG, max_num_seqs=2, policy=Priority(), max_num_batched_tokens=16)
    bench = Bench(config)
    bench.give(Submit(ask("a", 4, 9, priority=1)), Submit(ask("low", 6, 9, priority=9)))
    bench.turn()
    bench.turn(Submit(ask("urgent", 4, 9, priority=0)))
    assert [(gone.id, gone.by) for gone in bench.reasons_of(Preempted)] == [
        ("low", ("urgent", 0))
    ]
    assert bench.plans[-1].run_ids == bench.state.running.run_ids
    assert [name for name, _ in bench.state.running.ids] == ["urgent", "a"]
    bench.drain()
    assert len(bench.ended) == 3


def test_of_several_that_run_the_last_is_displaced() -> None:
    bench = Bench(evolve(CONFIG, policy=Priority()))
    bench.give(*(Submit(ask(f"r{rank}", 4, 9, priority=rank)) for rank in (1, 2, 3, 4)))
    bench.turn()
    bench.turn(Submit(ask("urgent", 4, 9)))
    assert [gone.id for gone in bench.reasons_of(Preempted)] == ["r4"]
    bench.drain()


class Tight(Priority):
    """Gives a token to each step but the first."""

    def budget(self, state: Any, load: Load) -> int:
        del state
        return 1 if load.step else load.budget


def test_no_sample_is_preempted_for_tokens_that_are_not_enough() -> None:
    bench = Bench(evolve(CONFIG, policy=Tight()))
    bench.give(*(Submit(ask(f"r{rank}", 4, 9, priority=rank)) for rank in (1, 2)))
    bench.turn(Submit(ask("urgent", 4, 9)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("urgent", 0, "budget")]
    assert not bench.reasons_of(Preempted)
    bench.drain()


def test_one_is_displaced_for_its_token() -> None:
    config = evolve(CONFIG, policy=Tight(), max_num_seqs=2, max_num_batched_tokens=16)
    bench = Bench(config)
    bench.give(Submit(ask("low", 4, 9, priority=1)))
    bench.turn(Submit(ask("urgent", 1, 9)))
    assert [gone.id for gone in bench.reasons_of(Preempted)] == ["low"]
    assert bench.state.running.ids == (("urgent", 0),)
    bench.drain()


def test_the_last_that_runs_is_displaced_for_its_blocks() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=8, policy=Priority()))
    bench.give(Submit(ask("low", 16, 9, priority=9)))
    bench.turn()
    bench.turn(Submit(ask("urgent", 15, 9)))
    bench.turn()
    assert [(gone.id, gone.by) for gone in bench.reasons_of(Preempted)] == [
        ("low", ("urgent", 0))
    ]
    assert bench.state.running.ids == (("urgent", 0),)
    bench.drain()


def test_none_is_displaced_for_a_sample_that_waits_for_its_sibling() -> None:
    bench = Bench(evolve(CONFIG, policy=Priority()))
    bench.give(Submit(ask("low", 4, 9, priority=9)))
    bench.turn(Submit(ask("urgent", 4, 9, n=2)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("urgent", 1, "sibling")]
    assert not bench.reasons_of(Preempted)
    bench.drain()


class Counting(FirstCome):
    """Notes how many of a client are said to have come in the step."""

    def __init__(self) -> None:
        object.__setattr__(self, "noted", list[tuple[str, int]]())

    def defer(
        self, state: Any, request: Request, load: Load, came: int
    ) -> tuple[bool, Any]:
        del load
        vars(self)["noted"].append((request.client, came))
        return False, state


def test_a_policy_hears_how_many_of_a_client_came_in_the_step() -> None:
    policy = Counting()
    bench = Bench(evolve(CONFIG, policy=policy))
    bench.give(*(Submit(ask(f"r{i}", client=one)) for i, one in enumerate("abaa")))
    assert vars(policy)["noted"] == [("b", 0), ("a", 1), ("a", 2)], "but for the first"


def test_a_load_is_not_paused_once_an_admitted_sequence_runs_in_the_step() -> None:
    bench = Bench(CONFIG)
    bench.give(Submit(evolve(ask("x", 5, 9), needs_host_mask=True)))
    bench.turn(Pause("x", 0))
    bench.turn()
    state = bench.state
    assert current_load(bench.config, state, 1).paused
    work = StepBuilder(bench.config, state)
    work.newcomers.append(Admission(state.running, (), ()))
    assert not _load(work).paused
    work.skipped.update(state.running.run_ids)
    assert _load(work).paused
