"""Who has to begin again keeps all it knows."""

import math
from typing import Any

from attrs import evolve

from minfer.lifecycle.preempt import _with_rank
from minfer.policies.builtin import Ageing, Priority, Shortest
from minfer.records.config import CacheGroup
from minfer.records.messages import Finish, Preempted, Submit, Tick
from minfer.records.policy import FirstCome, Rank
from minfer.records.request import Continuation, PromptOnly, Request
from minfer.records.sequence import Running
from tests.core.test_engine import CONFIG, Bench, ask


def only(bench: Bench) -> Running:
    assert len(bench.state.running) == 1
    return bench.state.running


class Again(Ageing):
    """Places who was preempted where it is told to."""

    def requeue_rank(
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


def test_a_better_place_that_another_one_has_is_not_taken() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, max_num_seqs=3, policy=Again()))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while len(bench.state.running) < 3:
        bench.turn()
    bench.turn(
        Submit(ask("twin", 24, 1, continuation=Continuation(place=((-5.0,), 2, 0))))
    )
    while not bench.reasons_of(Preempted):
        bench.turn()
    assert bench.reasons_of(Preempted)[0].id == "ccc"
    places = [seq.place for seq in bench.state.waiting]
    assert places == sorted(set(places))
    assert len(places) == 2
    bench.give(Finish("ccc", 0, 1))
    assert [seq.id for seq in bench.state.waiting] == [("twin", 0)]


def test_who_comes_back_after_a_failed_step_is_a_new_generation_in_its_old_row() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 9, 20)), Submit(ask("bb", 9, 20)))
    for _ in range(3):
        bench.turn()
    before = bench.state
    bench.give(bench.oracle.fail("boom", halfway=True))
    run = bench.state.running
    assert run.run_ids == (before.next_run_id, before.next_run_id + 1)
    assert bench.state.next_run_id == before.next_run_id + 2
    assert (run.ids, run.rows) == (before.running.ids, before.running.rows)
    assert run.num_known_at_admission == run.known == before.running.known
    assert run.starts == tuple(known - 1 for known in run.known)
    assert [fill.tokens for fill in bench.plans[-2].fills] == [
        bench.out[name, 0][-1:] for name in ("a", "bb")
    ]
    bench.drain()
    for name in ("a", "bb"):
        assert bench.out[name, 0] == bench.right(ask(name, 9, 20))


def test_who_begins_anew_after_a_failed_step_has_nothing_left_of_its_windows() -> None:
    """What pools the mean of its prompt computes all of it."""
    bench = Bench(evolve(CONFIG, groups=(CacheGroup(8), CacheGroup(12)), num_blocks=64))
    asked = ask("a", 40, 0, prompt_only=PromptOnly("mean"))
    bench.give(Submit(asked))
    bench.turn()
    bench.give(bench.oracle.fail("boom", halfway=True))
    (chain,) = only(bench).chains
    assert (chain.sealed, chain.low) == ((0, 0), (0, 0))
    assert only(bench).starts == (0,)
    bench.drain()
    assert bench.ended["a", 0].reason == "length"


def test_a_place_is_kept_by_who_is_displaced() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Priority()))
    bench.give(Submit(ask("slow", 6, 9, priority=3)))
    bench.turn(Tick(math.pi), Submit(ask("urgent", 6, 2, priority=1)))
    (seq,) = bench.state.waiting
    assert seq.place == ((3.0,), 0, 0)
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


def test_work_that_was_done_counts_for_who_is_sent_back() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, policy=Shortest(0.1)))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while not bench.reasons_of(Preempted):
        bench.turn()
    back = next(seq for seq in bench.state.waiting if seq.preempted)
    left = 24 - len(bench.out["ccc", 0])
    assert back.place[0] == (back.arrived + 0.1 * (8 / 64 + left),)
    other = evolve(bench.state.requests["ccc"], moved=((1, (-9.0,)),))
    requests = bench.state.requests.set("ccc", other)
    moved = _with_rank(requests, back, (-2.0,))["ccc"].moved
    assert dict(moved) == {0: (-2.0,), 1: (-9.0,)}
