"""Steps that failed: who is blamed, who ends, and that the others go on."""

from attrs import evolve

from minfer.records.messages import (
    Discarded,
    Ended,
    Failed,
    Pause,
    Preempted,
    Submit,
)
from tests.core.planning.test_states import STATES
from tests.core.test_engine import CONFIG, Bench, ask


def two_at_fault(failures: int) -> Bench:
    """Two requests whose common step has failed so often."""
    bench = Bench(evolve(CONFIG, max_failures=5))
    bench.give(Submit(ask("a", 5, 9)), Submit(ask("bb", 5, 9)))
    for _ in range(failures):
        bench.give(bench.oracle.fail("boom", halfway=False))
    assert bench.state.faults == ((("a", 0), failures), (("bb", 0), failures))
    return bench


def test_a_good_step_clears_the_faults_of_all_in_it() -> None:
    bench = two_at_fault(1)
    bench.turn()
    assert bench.state.faults == ()
    bench.drain()


def one_row_and_two() -> Bench:
    """Two requests, of which one has a row in the first step in flight, both in the
    second.
    """
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 5, 9, needs_host_mask=True)), Submit(ask("bb", 5, 9)))
    while [len(plan.run_ids) for plan in bench.state.inflight] != [1, 2]:
        bench.turn()
    return bench


def test_a_good_step_leaves_their_faults_to_those_in_the_steps_behind_it() -> None:
    bench = one_row_and_two()
    faults = ((("a", 0), 1), (("bb", 0), 1))
    bench.state = evolve(bench.state, faults=faults)
    bench.turn()
    assert bench.state.faults == faults[:1], "it is in the next step, which is not over"
    bench.turn()
    assert not bench.state.faults


def test_faults_add_up_only_for_who_was_in_the_failed_step() -> None:
    bench = two_at_fault(2)
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert bench.state.faults == ((("a", 0), 3), (("bb", 0), 2))
    (*_, last) = bench.reasons_of(Discarded)
    assert (last.plans, last.rows, last.error) == (1, 1, "boom")


def test_a_failed_step_names_itself_its_plans_and_its_rows() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 5, 9)), Submit(ask("bb", 5, 9)))
    bench.give(Failed(1, "boom"))
    (voided,) = bench.reasons_of(Discarded)
    assert voided == Discarded(1, "boom", 2, 2)


def test_a_later_step_that_fails_is_blamed_on_its_own_rows() -> None:
    bench = one_row_and_two()
    bench.give(Failed(bench.state.inflight[1].step, "boom"))
    assert dict(bench.state.faults) == {("a", 0): 1, ("bb", 0): 1}


def test_who_fails_for_the_last_time_ends_with_the_error_and_the_others_go_on() -> None:
    bench = Bench(evolve(CONFIG, max_failures=2))
    bench.give(Submit(ask("a", 5, 9)))
    bench.give(bench.oracle.fail("first", halfway=False))
    assert not bench.ended
    bench.give(bench.oracle.fail("second", halfway=False))
    assert bench.ended["a", 0].reason == "error"
    assert bench.ended["a", 0].error == "its step failed 2 times, at last with: second"
    assert [(type(r), getattr(r, "error", "")) for r in bench.reasons[-2:]] == [
        (Discarded, "second"),
        (Ended, bench.ended["a", 0].error),
    ]
    assert not bench.state.faults
    assert not bench.state.running.run_ids


def test_rows_that_are_in_no_failed_step_keep_their_states() -> None:
    bench = Bench(evolve(STATES, depth=1))
    paused = ask("paused", 5, 9, needs_host_mask=True)
    bench.give(Submit(paused), Submit(ask("a", 5, 9)))
    bench.turn(Pause("paused", 0))
    bench.turn()
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert [reason.id for reason in bench.reasons_of(Preempted)] == ["a"]
    bench.give(Pause("paused", 0, paused=False))
    bench.drain()
    assert bench.out["paused", 0] == bench.right(paused)


def test_with_one_failure_allowed_rows_that_were_in_no_failed_step_go_on() -> None:
    bench = Bench(evolve(CONFIG, depth=1, max_failures=1))
    paused = ask("paused", 5, 9, needs_host_mask=True)
    bench.give(Submit(paused), Submit(ask("a", 5, 9)))
    bench.turn(Pause("paused", 0))
    bench.turn()
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert [*bench.ended] == [("a", 0)]
    bench.give(Pause("paused", 0, paused=False))
    bench.drain()
    assert bench.out["paused", 0] == bench.right(paused)
