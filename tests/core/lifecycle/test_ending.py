"""How samples and requests end, and who hears of it."""

from typing import Any

from attrs import evolve

from minfer.records.messages import Cancel, Finish, Finished, Preempted, Submit
from minfer.records.policy import FirstCome
from minfer.records.request import Request
from tests.core.test_engine import CONFIG, Bench, ask


class Heard(FirstCome):
    """Keeps what it is told of ends."""

    def start(self) -> tuple[Any, ...]:
        return ()

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        return (*state, (request.id, output, ran))


def test_the_end_of_a_request_is_that_of_its_last_sample() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 6, 9, n=3)))
    for _ in range(3):
        bench.turn()
    bench.turn(Finish("a", 1, 1))
    assert bench.state.requests["a"].ended == 1
    bench.turn(Finish("a", 0, 2, "length"))
    assert bench.state.requests["a"].ended == 2
    assert set(bench.state.running.ids) == {("a", 2)}
    bench.turn(Finish("a", 2, 1))
    assert not bench.state.requests
    assert bench.ended["a", 0] == Finished("a", 0, "length", 2)
    assert {name: done.length for name, done in bench.ended.items()} == {
        ("a", 0): 2,
        ("a", 1): 1,
        ("a", 2): 1,
    }


def test_a_policy_hears_how_much_came_out_and_whether_it_ever_ran() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Heard()))
    bench.give(Submit(ask("a", 3, 3)), Submit(ask("b", 3, 3)), Submit(ask("c", 3, 3)))
    bench.turn(Cancel("b"))
    bench.turn(Cancel("a"))
    bench.drain()
    assert bench.state.policy == (("b", 0, False), ("a", 2, True), ("c", 3, True))


def test_a_sample_that_ends_takes_along_only_its_own_faults() -> None:
    bench = Bench(evolve(CONFIG, max_failures=5))
    bench.give(Submit(ask("a", 5, 9)), Submit(ask("bb", 5, 9)))
    bench.give(bench.oracle.fail("boom", halfway=False))
    bench.give(Cancel("a"))
    assert bench.state.faults == ((("bb", 0), 1),)
    bench.drain()


def test_who_ran_and_was_sent_back_counts_as_having_run_when_it_is_cancelled() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, policy=Heard()))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while not bench.reasons_of(Preempted):
        bench.turn()
    had = len(bench.out["ccc", 0])
    bench.give(Cancel("ccc"))
    assert bench.state.policy == (("ccc", had, True),)
    bench.drain()
