"""Which KV is there for certain."""

from attrs import evolve

from minfer.lifecycle.committed import committed
from minfer.records.messages import Submit
from tests.core.test_engine import CONFIG, Bench, ask


def test_committed_is_what_is_there_when_all_in_flight_is_lost() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 20, 9)))
    seen = [committed(bench.config, bench.state, 0)]
    for _ in range(4):
        bench.turn()
        seen.append(committed(bench.config, bench.state, 0))
    # Chunks of 16 and 4 tokens; then every token's KV is there once the next one is
    # known.
    assert seen == [0, 16, 20, 21, 22]


def test_between_steps_all_that_was_planned_is_committed() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 20, 9)))
    state = evolve(bench.state, inflight=())
    assert committed(bench.config, state, 0) == 16


def test_a_tail_that_is_being_copied_is_not_there_yet() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 11, 5, n=2)))
    bench.turn()
    assert bench.plans[-1].copies
    assert [committed(bench.config, bench.state, i) for i in (0, 1)] == [11, 8]
    bench.turn()
    assert [committed(bench.config, bench.state, i) for i in (0, 1)] == [12, 11]
