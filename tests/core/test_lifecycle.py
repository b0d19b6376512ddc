"""How a sequence leaves: what stays cached, what waits behind a fence, and how it comes
back.
"""

import math
from typing import Any

import pytest
from attrs import evolve

from minfer.committed import committed
from minfer.messages import Admitted, Cancel, Finish, Finished, Preempted, Submit, Tick
from minfer.policies import Ageing, Priority
from minfer.policy import FirstCome, Rank
from minfer.prefix import lookup
from minfer.request import Request, SamplingParams
from minfer.sequence import Running
from minfer.state import Fence
from tests.core.test_engine import CONFIG, Bench, ask


def only(bench: Bench) -> Running:
    assert len(bench.state.running) == 1
    return bench.state.running


def test_a_seat_counts_from_what_is_known_and_ends_with_the_limit_or_the_context() -> (
    None
):
    for most, last in ((9, 14), (500, 63)):
        bench = Bench()
        bench.give(Submit(ask("a", 6, most)))
        run = only(bench)
        assert (run.base, run.known, run.starts) == ((6,), (6,), (0,))
        assert run.last == (last,)
        assert run.tails == (run.seqs[0].history[4:],)
        bench.drain()
        assert bench.ended["a", 0].length == min(most, 58)


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


def test_prompts_publish_as_their_chunks_are_done_and_outputs_as_blocks_fill() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 20, 9)))
    sealed = []
    while bench.state.requests:
        sealed.append(
            (bench.state.running.known[0], bench.state.running.chains[0].sealed)
        )
        bench.turn()
    assert sealed[:2] == [(20, 0), (20, 4)]
    assert dict(sealed[2:]) == {21: 5, 22: 5, 23: 5, 24: 5, 25: 6, 26: 6, 27: 6, 28: 6}
    keys = bench.state.blocks.prefix.index
    assert len(keys) == 7, "the last full block is published on the way out"


def test_who_leaves_gives_back_all_its_blocks_and_what_is_full_stays_cached() -> None:
    bench = Bench()
    request = ask("a", 9, 5)
    bench.give(Submit(request))
    for _ in range(3):
        bench.turn()
    keys = only(bench).seqs[0].keys
    bench.turn(Cancel("a"))
    assert bench.state.blocks.available == CONFIG.num_blocks
    assert bench.state.blocks.live == 0
    assert lookup(bench.state.blocks.prefix, keys) == 2
    assert bench.state.free_rows == (3, 2, 1, 0)
    assert bench.reasons_of(Admitted)


def test_with_plans_in_flight_the_blocks_wait_for_the_last_of_them() -> None:
    bench = Bench(evolve(CONFIG, depth=3))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    bench.turn()
    last = bench.state.inflight[-1].step
    (table, _) = bench.state.running.tables
    bench.give(Cancel("a"))
    assert [fence.until for fence in bench.state.fences] == [last]
    (fence,) = bench.state.fences
    assert set(fence.private) <= set(table)
    assert len(set(fence.private)) + 2 == len(table), (
        "two blocks of the prompt were published"
    )
    while bench.state.inflight[0].step <= last:
        assert bench.state.fences == (fence,)
        bench.turn()
    assert not bench.state.fences
    bench.drain()
    assert bench.state.blocks.available == CONFIG.num_blocks


def test_a_failed_step_opens_all_fences() -> None:
    bench = Bench(evolve(CONFIG, depth=3))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    bench.turn()
    bench.give(Cancel("a"))
    assert isinstance(bench.state.fences[0], Fence)
    bench.give(bench.oracle.fail("boom", halfway=False))
    assert not bench.state.fences
    bench.drain()
    assert bench.out["bb", 0] == bench.right(ask("bb", 9, 20))


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


def test_ends_of_one_turn_are_told_in_the_order_of_rank() -> None:
    bench = Bench()
    bench.give(*(Submit(ask(name, 3, 3)) for name in ("a", "bb", "ccc")))
    bench.drain()
    assert list(bench.ended) == [("a", 0), ("bb", 0), ("ccc", 0)]


class Heard(FirstCome):
    """Keeps what it is told of ends."""

    def start(self) -> tuple[Any, ...]:
        return ()

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        return (*state, (request.id, output, ran))


def test_a_policy_hears_how_much_came_out_and_whether_it_ever_ran() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Heard()))
    bench.give(Submit(ask("a", 3, 3)), Submit(ask("b", 3, 3)), Submit(ask("c", 3, 3)))
    bench.turn(Cancel("b"))
    bench.turn(Cancel("a"))
    bench.drain()
    assert bench.state.policy == (("b", 0, False), ("a", 2, True), ("c", 3, True))


def test_who_ends_takes_its_faults_along_and_nobody_elses() -> None:
    bench = Bench(evolve(CONFIG, max_failures=5))
    bench.give(Submit(ask("a", 5, 9)), Submit(ask("bb", 5, 9)))
    bench.give(bench.oracle.fail("boom", halfway=False))
    bench.give(Cancel("a"))
    assert bench.state.faults == ((("bb", 0), 1),)
    bench.drain()


class Again(Ageing):
    """Places who was preempted where it is told to."""

    def again(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        del state, request
        assert rank == (arrived,)
        assert done > 0
        return (-5.0,)


def test_who_is_sent_back_keeps_all_it_knows_and_may_get_a_better_place() -> None:
    for policy, rank in ((FirstCome(), ()), (Again(), (-5.0,))):
        bench = Bench(evolve(CONFIG, num_blocks=9, policy=policy))
        bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
        while not bench.reasons_of(Preempted):
            before = bench.state.running
            bench.turn()
        back = next(seq for seq in bench.state.waiting if seq.preempted)
        assert back.id == ("ccc", 0)
        assert back.place == (rank, 2, 0)
        assert back.history == back.request.prompt + bench.out["ccc", 0]
        assert len(back.keys) == len(back.history) // 4
        assert back.preempted == 1
        moved = bench.state.requests["ccc"].moved
        assert moved == (((0, rank),) if rank else ()), (
            "only a new rank has to be remembered"
        )
        (gone,) = bench.reasons_of(Preempted)
        assert gone.known == len(back.history)
        assert gone.computed == len(back.history) - 1
        assert before.ids[-1] == ("ccc", 0)
        bench.drain()
        assert bench.out["ccc", 0] == bench.right(ask("ccc", 8, 24))


def test_who_comes_back_after_a_failed_step_is_a_new_generation_in_its_old_row() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    for _ in range(3):
        bench.turn()
    before = bench.state
    bench.give(bench.oracle.fail("boom", halfway=True))
    run = bench.state.running
    assert run.gens == (before.next_gen, before.next_gen + 1)
    assert bench.state.next_gen == before.next_gen + 2
    assert (run.ids, run.rows) == (before.running.ids, before.running.rows)
    assert run.base == run.known == before.running.known
    assert run.starts == tuple(known - 1 for known in run.known)
    assert [fill.tokens for fill in bench.plans[-2].fills] == [
        bench.out[name, 0][-1:] for name in ("a", "bb")
    ]
    bench.drain()
    for name in ("a", "bb"):
        assert bench.out[name, 0] == bench.right(ask(name, 9, 20))


def test_what_a_sequence_does_not_fill_it_has_not_published_and_twins_stay_private() -> (
    None
):
    """Two that compute the same at the same time: the second's blocks are its own until
    it ends.
    """
    bench = Bench()
    prompt = tuple(range(8))
    bench.give(
        Submit(ask("a", prompt=prompt, max_tokens=9)),
        Submit(ask("b", prompt=prompt, max_tokens=9)),
    )
    bench.turn()
    first, second = bench.state.running.chains
    assert (first.sealed, second.sealed) == (2, 0)
    assert bench.state.blocks.live == 2
    bench.turn(Cancel("a"))
    assert bench.state.blocks.live == 0, "the second does not stand on them"
    bench.drain()
    assert bench.state.blocks.available == CONFIG.num_blocks


def test_the_end_of_a_chain_is_evicted_before_its_beginning_with_a_window_too() -> None:
    bench = Bench(evolve(CONFIG, window=8, num_blocks=8, max_model_len=32))
    bench.give(Submit(ask("a", 13, 1)))
    bench.turn()
    idle = bench.state.blocks.prefix.idle
    order = [block for _, block in sorted(idle.items())]
    assert order == [*reversed(bench.plans[0].opens[0].tables[0][:3])]


@pytest.mark.parametrize("window", [0, 6])
def test_cancelled_samples_leave_nothing_behind(window: int) -> None:
    bench = Bench(evolve(CONFIG, window=window, depth=2))
    hot = SamplingParams(temperature=1)
    bench.give(Submit(ask("a", 11, 20, n=3, sampling=hot)))
    for _ in range(9):
        bench.turn()
    bench.turn(Cancel("a"))
    while bench.state.inflight:
        bench.turn()
    assert bench.state.blocks.available == CONFIG.num_blocks
    assert bench.state.running == Running()


def test_a_place_is_kept_by_who_is_displaced() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Priority()))
    bench.give(Submit(ask("slow", 6, 9, priority=3)))
    bench.turn(Tick(math.pi), Submit(ask("urgent", 6, 2, priority=1)))
    (seq,) = bench.state.waiting
    assert seq.place == ((3.0,), 0, 0)
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


def test_a_sample_knows_how_often_it_was_sent_back() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    most = 0
    while bench.state.requests:
        bench.turn()
        gone = [reason.id for reason in bench.reasons_of(Preempted)]
        for seq in (*bench.state.waiting, *bench.state.running.seqs):
            assert seq.preempted == gone.count(seq.request.id)
            most = max(most, seq.preempted)
    assert most > 1
