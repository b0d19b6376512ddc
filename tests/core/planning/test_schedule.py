"""What a step takes on: rows that run, chunks, newcomers, and none when nothing can be
done.
"""

from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.planning.schedule import queue_blocked_by
from minfer.policies.builtin import Priority
from minfer.records.config import CacheGroup
from minfer.records.messages import Admitted, QueueBlocked, Submit
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Request
from minfer.records.state import BlockedHead
from minfer.values import thresholds
from tests.core.test_engine import CONFIG, Bench, ask


def test_stop_ids_of_all_that_run_are_kept_when_those_of_the_gone_are_sorted_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "STOP_IDS", 2)
    bench = Bench()
    bench.give(Submit(ask("gone", 4, 1, stop_ids=frozenset((1, 2)))))
    bench.turn(Submit(ask("stays", 4, 9, stop_ids=frozenset((3,)))))
    bench.turn(Submit(ask("new", 4, 9, stop_ids=frozenset((4,)))))
    assert bench.state.stops == {3, 4}
    bench.turn(Submit(ask("newer", 4, 9, stop_ids=frozenset((5,)))))
    assert bench.state.stops == {3, 4, 5}


def test_stop_ids_are_not_sorted_out_before_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "STOP_IDS", 3)
    bench = Bench()
    bench.give(Submit(ask("gone", 4, 1, stop_ids=frozenset((1, 2)))))
    bench.turn()
    bench.turn(Submit(ask("new", 4, 9, stop_ids=frozenset((3,)))))
    assert bench.state.stops == {1, 2, 3}


def test_chunks_share_what_running_rows_leave_of_the_budget() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 4, 30)))
    bench.turn(Submit(ask("bb", 40, 3)), Submit(ask("ccc", 40, 3)))
    for _ in range(3):
        bench.turn()
    last = bench.plans[-4:]
    assert [plan.num_scheduled_tokens for plan in last] == [
        (1, 15),
        (1, 15),
        (1, 10, 5),
        (1, 1, 14),
    ]
    assert [plan.max_sampled_tokens for plan in last] == [
        (1, 0),
        (1, 0),
        (1, 1, 0),
        (1, 1, 0),
    ]
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("ccc", 0, "budget")]
    bench.drain()


def test_every_row_that_is_filled_gets_a_token_however_small_the_budget() -> None:
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=4))
    bench.give(*(Submit(ask("x" * n, 3, 9)) for n in (1, 2)))
    for _ in range(9):
        bench.turn()
        assert 0 < sum(bench.plans[-1].num_scheduled_tokens) <= 4
        if not bench.state.requests:
            break
    bench.drain()


def test_rows_that_are_planned_to_their_last_token_are_left_out() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("short", 4, 1)), Submit(ask("long", 4, 9)))
    first, second = bench.plans
    assert len(first.run_ids) == 2
    assert second.run_ids == first.run_ids[1:], "the first has its only token planned"
    bench.drain()
    assert len(bench.out["long", 0]) == 9


def test_when_all_is_planned_nothing_more_is() -> None:
    bench = Bench(evolve(CONFIG, depth=3))
    bench.give(Submit(ask("a", 4, 2)))
    assert len(bench.plans) == 2
    assert bench.state.next_step == 2
    bench.drain()


def test_when_none_in_lockstep_runs_they_are_no_longer_looked_for() -> None:
    bench = Bench()
    bench.give(
        Submit(ask("bound", max_tokens=2, needs_host_mask=True)), Submit(ask("free"))
    )
    looked_for = []
    for _ in range(3):
        bench.turn()
        looked_for.append((bench.state.needs_host_mask, len(bench.state.running)))
    assert looked_for == [(True, 2), (False, 1), (False, 1)]


def test_when_no_row_is_in_prefill_none_is_looked_for_until_one_comes() -> None:
    bench, filling = Bench(), []
    for events in ((Submit(ask("a", 20, 9)),), (), (), (Submit(ask("b")),), ()):
        bench.turn(*events)
        filling.append(bench.state.filling)
    assert filling == [True, True, False, True, False]


def test_a_prompt_runs_a_budget_and_a_quarter_ahead_of_its_window() -> None:
    bench = Bench(evolve(CONFIG, groups=(CacheGroup(8),), depth=4))
    bench.give(Submit(ask("a", 60, 1)))
    assert [plan.num_scheduled_tokens for plan in bench.state.inflight] == [(16,), (4,)]
    bench.turn()
    assert [plan.num_scheduled_tokens for plan in bench.state.inflight] == [(4,), (16,)]
    bench.drain()


def test_who_has_not_been_looked_at_waits_for_a_step() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 4, 9)))
    bench.give(Submit(ask("b", 4, 9)))
    assert queue_blocked_by(bench.config, bench.state) == "step"


def test_the_cause_is_that_of_who_is_next_and_not_of_who_is_passed() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask("runs")), *(Submit(ask(name, client=name)) for name in "ab"))
    first, second = bench.state.waiting
    state = evolve(bench.state, deferred_clients=frozenset("a"))
    for held, cause in ((second, "rows"), (first, "step")):
        found = evolve(state, blocked=BlockedHead(held.place, "rows"))
        assert queue_blocked_by(bench.config, found) == cause


def test_while_a_sample_is_suspected_the_queue_waits() -> None:
    bench = Bench(evolve(CONFIG, max_failures=3))
    bench.give(Submit(ask("a", 4, 9)), Submit(ask("b", 4, 9)))
    causes = []
    for _ in range(2):
        causes.append(queue_blocked_by(bench.config, bench.state))
        bench.give(bench.oracle.fail("boom", halfway=False))
    bench.give(Submit(ask("c", 4, 9)))
    causes.append(queue_blocked_by(bench.config, bench.state))
    assert causes == ["step", "step", "fault"]
    assert len(bench.plans[-1].run_ids) == 1
    assert len(bench.state.running) == 2
    bench.drain()
    assert {done.reason for done in bench.ended.values()} == {"length"}


def test_a_suspect_runs_isolated_one_step_at_a_time() -> None:
    bench = Bench(evolve(CONFIG, max_failures=2, depth=3))
    bench.give(Submit(ask("a", 4, 9)), Submit(ask("b", 4, 9)))
    bench.give(bench.oracle.fail("boom", halfway=False))
    flying = [bench.state.inflight]
    bench.turn()
    assert bench.state.faults == ((("b", 0), 1),)
    flying.append(bench.state.inflight)
    bench.turn()
    flying.append(bench.state.inflight)
    assert [len(plans) for plans in flying] == [1, 1, 3]
    first, second = bench.state.running.run_ids
    assert [plans[0].run_ids for plans in flying] == [
        (first,),
        (second,),
        (first, second),
    ]
    bench.drain()


def test_with_one_failure_allowed_no_sample_is_isolated_before_it() -> None:
    bench = Bench(evolve(CONFIG, max_failures=1))
    bench.give(Submit(ask("a", 4, 9)), Submit(ask("b", 4, 9)))
    assert len(bench.state.inflight[0].run_ids) == 2
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert {done.reason for done in bench.ended.values()} == {"error"}


def test_a_suspect_gets_all_of_the_budget() -> None:
    bench = Bench(evolve(CONFIG, policy=Priority()))
    bench.give(Submit(ask("low", 40, 3, priority=5)))
    bench.turn()
    bench.turn(Submit(ask("urgent", 40, 3, priority=1)))
    assert bench.plans[-1].num_scheduled_tokens == (8, 8), (
        "each has a chunk of its prompt in this step"
    )
    for _ in range(2):
        bench.give(bench.oracle.fail("boom", halfway=False))
    bench.turn()
    solo = bench.plans[-2:]
    assert [plan.num_scheduled_tokens for plan in solo] == [(16,), (8,)]
    assert solo[0].run_ids != solo[1].run_ids
    bench.drain()
    assert {done.reason for done in bench.ended.values()} == {"length"}


@frozen
class NotBesideOne(FirstCome):
    """Client "a" lets others pass while fewer than two run."""

    def defer(
        self, state: Any, request: Request, load: Load, came: int
    ) -> tuple[bool, Any]:
        del came
        return request.client == "a" and load.running < 2, state


def test_newcomers_that_passed_another_take_their_places_in_rank_order() -> None:
    bench = Bench(evolve(CONFIG, policy=NotBesideOne()))
    bench.give(Submit(ask("runs", 4, 9)))
    late = [ask("held", 4, 9, client="a"), ask("passes", 4, 9, client="b")]
    bench.turn(*map(Submit, late))
    admitted = [one.id for one in bench.reasons_of(Admitted)]
    assert admitted == ["runs", "passes", "held"]
    assert [name for name, _ in bench.state.running.ids] == ["runs", "held", "passes"]
