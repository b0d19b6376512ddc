"""Who is let in, what it gets, and what is said of it."""

from random import Random

import pytest
from attrs import evolve

from minfer.planning.admit import Admission, admit, current_load, shortage
from minfer.planning.prefix_hit import pages_needed
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Executed, Missed, QueueBlocked, Submit
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Continuation, SamplingParams
from minfer.values import thresholds
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask
from tests.core.world import World


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple((start + 3 * i) % VOCAB for i in range(length))


def test_what_a_policy_may_look_at() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, depth=2))
    bench.give(Submit(ask("a", 6, 9)))
    bench.give(Submit(ask("b", 6, 9, n=2)))
    bench.give()
    state = bench.state
    available = state.blocks.available
    assert available < CONFIG.num_blocks
    step = state.next_step
    assert step > 1
    assert current_load(bench.config, state) == Load(
        3.0, 2, 1, available, 2.0, 16, 1, step
    )
    assert current_load(bench.config, state, 3) == Load(
        3.0, 2, 4, available, 2.0, 16, 1, step
    )
    assert not current_load(
        bench.config, evolve(state, paused=frozenset({("b", 0)}))
    ).paused
    bench.drain()
    assert current_load(bench.config, bench.state).arrived == bench.state.time, (
        "now, if none waits"
    )


def test_a_neighbour_with_another_prefix_does_not_lend_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "LONG_PREFIX", 1)
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=64))
    shared = prompt(0, 9)
    bench.give(
        Submit(ask("own", 0, 20, prompt=prompt(1, 13))),
        Submit(ask("kin", 0, 20, prompt=shared)),
        Submit(ask("other", 0, 20, prompt=prompt(2, 13))),
    )
    bench.turn()
    bench.turn(Submit(ask("new", 0, 20, prompt=(*shared, 7))))
    ids, tables = (
        [name for name, _ in bench.state.running.ids],
        bench.state.running.tables,
    )
    assert tables[ids.index("new")][0][:2] == tables[ids.index("kin")][0][:2]
    (*_, got) = bench.reasons_of(Admitted)
    assert (got.id, got.hit) == ("new", 8)
    bench.drain()
    assert len(bench.ended) == 4


def test_a_neighbours_table_gives_no_more_than_what_is_a_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as the hit is not all of the table, whose last block may not be
    published.
    """
    monkeypatch.setattr(thresholds, "LONG_PREFIX", 1)
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=64))
    bench.give(Submit(ask("a", 0, 20, prompt=prompt(0, 13))))
    bench.turn()
    bench.turn(Submit(ask("b", 0, 20, prompt=(*prompt(0, 8), 1, 2, 3))))
    (first,), (second,) = bench.state.running.tables
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    bench.drain()


def test_an_admission_is_reported_with_its_wait_hit_and_miss() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask("a", 0, 2, prompt=prompt(0, 9))))
    bench.give(Submit(ask("b", 0, 2, prompt=prompt(0, 14))))
    bench.drain()
    first, second = bench.reasons_of(Admitted)
    assert first == Admitted("a", 0, 0.0, 0, 9, 0, 0, 9)
    assert second == Admitted("b", 0, 1.0 + bench_turns_of("a"), 8, 14, 0, 8, 14)
    assert bench.reasons_of(Missed) == [Missed("a", 0, 0, 2), Missed("b", 0, 2, 3)]


def bench_turns_of(name: str) -> float:
    """Turns that `name` above runs beside the one in which the other comes."""
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask(name, 0, 2, prompt=prompt(0, 9))))
    bench.give()
    while bench.state.requests:
        bench.turn()
    return bench.clock - 3.0


def test_a_hit_is_not_missed_and_a_preempted_one_counts_no_prompt_again() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, depth=2))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    bench.drain()
    seen = set()
    for got in bench.reasons_of(Admitted):
        again = got.id in seen
        assert (got.prompt, got.cached) == ((0, 0) if again else (8, min(got.hit, 8)))
        seen.add(got.id)
    assert len(bench.reasons_of(Admitted)) > 3
    for missed in bench.reasons_of(Missed):
        assert missed.block < missed.blocks


def test_who_waits_for_a_row_or_for_blocks_says_so() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask("a", 6, 9)), Submit(ask("b", 6, 9)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("b", 0, "rows")]
    bench = Bench(evolve(CONFIG, num_blocks=4))
    bench.give(Submit(ask("a", 6, 9)), Submit(ask("bb", 9, 2)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("bb", 0, "blocks", 3, 2)]


def test_all_available_blocks_may_be_taken_and_no_more() -> None:
    for blocks, count in ((5, 2), (4, 1)):
        bench = Bench(evolve(CONFIG, num_blocks=blocks))
        bench.give(Submit(ask("a", 6, 2)), Submit(ask("bb", 9, 2)))
        assert len(bench.state.running) == count
        bench.drain()


def test_who_ends_a_block_with_more_to_come_needs_one_more_beside_others() -> None:
    """Or it would be sent back after its first step; alone it may take the last block."""
    bench = Bench(evolve(CONFIG, num_blocks=4))
    bench.give(Submit(ask("a", 6, 2)), Submit(ask("bb", 8, 2)))
    assert bench.reasons_of(QueueBlocked) == [QueueBlocked("bb", 0, "blocks", 3, 2)]
    bench = Bench(evolve(CONFIG, num_blocks=4))
    bench.give(Submit(ask("a", 6, 2)), Submit(ask("bb", 8, 1)))
    assert not bench.reasons_of(QueueBlocked), "its only token is never an input"
    bench = Bench(evolve(CONFIG, num_blocks=2))
    bench.give(Submit(ask("bb", 8, 1)))
    assert not bench.reasons_of(QueueBlocked)


def test_it_needs_that_one_also_where_only_those_of_earlier_plans_run() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=4))
    bench.give(Submit(ask("a", 6, 2)))
    waiting = Bench(evolve(CONFIG, num_blocks=4))
    waiting.give(Submit(ask("bb", 8, 2)))
    (seq,) = waiting.state.running.seqs
    blocked = QueueBlocked("bb", 0, "blocks", 3, 2)
    assert shortage(bench.config, bench.state, seq, []) == blocked
    assert shortage(bench.config, evolve(bench.state, free_rows=()), seq, []) == (
        QueueBlocked("bb", 0, "rows")
    )


@pytest.mark.parametrize("known", [7, 8, 9, 12, 16])
def test_alone_it_needs_no_spare_block_and_beside_newcomers_it_does(known: int) -> None:
    config = evolve(CONFIG, num_blocks=4, watermark=3)
    waiting = Bench(config)
    waiting.give(Submit(ask("bb", known, 1)))
    (seq,) = waiting.state.running.seqs
    empty, needs = Bench(config).state, -(-known // 4) + 3
    assert shortage(config, empty, seq, []) is None
    _, newcomer = admit(config, empty, seq, [], 16)
    assert isinstance(newcomer, Admission)
    assert shortage(config, empty, seq, [newcomer]) == (
        QueueBlocked("bb", 0, "blocks", needs, 4)
    )


def test_what_others_stand_on_costs_nothing_and_what_is_idle_costs_itself() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=20, depth=1))
    bench.give(Submit(ask("a", 0, 20, prompt=prompt(0, 9))))
    bench.turn()
    waiting = Bench(bench.config)
    waiting.give(Submit(ask("b", 0, 3, prompt=(*prompt(0, 9), 1, 2))))
    (seq,) = waiting.state.running.seqs
    assert pages_needed(bench.config, bench.state.blocks, seq, runs_alone=False) == 1
    assert pages_needed(bench.config, bench.state.blocks, seq, runs_alone=True) == 1
    kept = evolve(bench.config, watermark=2)
    assert pages_needed(kept, bench.state.blocks, seq, runs_alone=False) == 3
    assert pages_needed(kept, bench.state.blocks, seq, runs_alone=True) == 1
    bench.drain()
    assert pages_needed(bench.config, bench.state.blocks, seq, runs_alone=False) == 3


def test_with_a_window_what_is_behind_it_costs_nothing() -> None:
    world = World(
        evolve(CONFIG, groups=(CacheGroup(6),), num_blocks=30, max_num_batched_tokens=64),
        Random(0),
    )
    world.submit(ask("a", 0, 20, prompt=prompt(0, 17)))
    world.turn()
    world.turn()
    other = Bench(evolve(CONFIG, num_blocks=30))
    other.give(Submit(ask("b", 0, 3, prompt=(*prompt(0, 17), 1))))
    (seq,) = other.state.running.seqs
    # Position 16 reads blocks 2 and 3; the other, at 17, has let go of 2, which is idle.
    assert pages_needed(world.config, world.state.blocks, seq, runs_alone=False) == 1 + 1
    world.drain()
    assert pages_needed(world.config, world.state.blocks, seq, runs_alone=False) == 1 + 2


@pytest.mark.parametrize(("num_pages", "chunk"), [(22, 4), (23, 8), (28, 12), (31, 13)])
def test_what_left_the_windows_of_others_is_there_for_a_first_chunk(
    num_pages: int, chunk: int
) -> None:
    """Three pages have left the window of the sample that runs; none was released."""
    groups = (CacheGroup(4, pages=3), CacheGroup())
    config = evolve(CONFIG, groups=groups, num_blocks=num_pages)
    bench = Bench(evolve(config, max_num_batched_tokens=32))
    bench.turn(Submit(ask("a", 6, 11)))
    bench.turn()
    assert bench.state.running.scheduled == (7,)
    bench.turn(Submit(ask("new", 13, 3)))
    assert bench.plans[-1].num_scheduled_tokens == (1, chunk)


def test_a_sample_waits_for_its_sibling_in_the_same_plan_and_while_that_is_filled() -> (
    None
):
    bench = Bench()
    hot = SamplingParams(temperature=1)
    bench.give(Submit(ask("a", 20, 5, n=2, sampling=hot)))  # more than one step's budget
    assert [held.cause for held in bench.reasons_of(QueueBlocked)] == ["budget"]
    bench.turn()
    assert [held.cause for held in bench.reasons_of(QueueBlocked)] == [
        "budget",
        "sibling",
    ]
    bench.turn()
    assert len(bench.state.running) == 2
    (copy,) = bench.plans[-1].copies
    assert copy.count == 3, "of the last block all but the last token"
    (_, got) = bench.reasons_of(Admitted)
    assert (got.hit, got.copied) == (16, 3)
    bench.drain()
    assert bench.out["a", 1] == bench.right(ask("a", 20, 5, n=2, sampling=hot), 1)


def test_a_prompt_of_whole_blocks_and_one_more_is_forked_without_a_copy() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 9, 5, n=2)))
    bench.turn()
    assert len(bench.state.running) == 2
    assert not bench.plans[-1].copies
    assert bench.reasons_of(Admitted)[-1].hit == 8
    bench.drain()


def test_a_sibling_whose_window_begins_in_its_last_block_lends_it_too() -> None:
    bench = Bench(evolve(CONFIG, groups=(CacheGroup(2),)))
    bench.give(Submit(ask("a", 7, 5, n=2)))
    bench.turn()
    assert bench.state.running.chains[0].low == (1,), (
        "the first block is behind the window"
    )
    assert bench.reasons_of(Admitted)[-1].copied == 2


@pytest.mark.parametrize("groups", [(CacheGroup(2),), (CacheGroup(), CacheGroup(2))])
def test_a_sibling_whose_window_has_left_that_block_lends_none(
    groups: tuple[CacheGroup, ...],
) -> None:
    bench = Bench(evolve(CONFIG, groups=groups, max_num_seqs=2))
    bench.give(Submit(ask("other", 3, 8)), Submit(ask("a", 7, 12, n=2)))
    while len(bench.reasons_of(Admitted)) < 3:
        bench.turn()
    sibling = next(
        i for i, name in enumerate(bench.state.running.ids) if name == ("a", 0)
    )
    assert bench.state.running.chains[sibling].low[-1] > 1
    assert bench.reasons_of(Admitted)[-1].copied == 0


def test_another_request_is_no_sibling() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 9, 5, n=2)), Submit(ask("b", 6, 5, n=2)))
    bench.turn()
    bench.turn()
    assert len(bench.state.running) == 4
    bench.drain()
    for name, length in (("a", 9), ("b", 6)):
        assert bench.out[name, 1] == bench.right(ask(name, length, 5, n=2), 1)


def test_a_second_generation_does_not_wait_for_siblings_and_results_are_its_own() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=8))
    bench.give(Submit(ask("a", 6, 20, n=2)))
    bench.drain()
    assert len(bench.reasons_of(Admitted)) > 2, "one had to give way and came back"
    for sample in (0, 1):
        assert bench.out["a", sample] == bench.right(ask("a", 6, 20, n=2), sample)


class Listener(FirstCome):
    """Keeps what it is told of admissions."""

    def start(self) -> tuple[Load, ...]:
        return ()

    def admitted(
        self, state: tuple[Load, ...], rank: object, request: object, load: Load
    ) -> object:
        del rank, request
        return (*state, load)


def test_a_policy_hears_of_a_first_admission_with_the_load_just_before_it() -> None:
    bench = Bench(evolve(CONFIG, policy=Listener()))
    bench.give(Submit(ask("a", 6, 5)), Submit(ask("b", 6, 5)))
    first, second = bench.state.policy
    assert (first.waiting, first.running, first.available) == (2, 0, 32)
    assert (second.waiting, second.running) == (1, 1)
    bench.drain()
    assert len(bench.state.policy) == 2


def test_rows_are_taken_from_the_end_and_generations_are_never_used_twice() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 6, 5)), Submit(ask("b", 6, 5, stop_ids=frozenset((3,)))))
    run = bench.state.running
    assert run.rows == run.run_ids == (0, 1)
    assert bench.state.free_rows == (3, 2)
    assert bench.state.next_run_id == 2
    assert bench.state.stops == {3}
    bench.turn(Executed(99, ()))
    bench.drain()


def test_only_prompt_tokens_count_as_cached() -> None:
    bench = Bench()
    known = prompt(0, 13)
    bench.give(Submit(ask("first", 0, 1, prompt=known)))
    bench.turn()
    bench.give(Submit(ask("resumed", 0, 12, prompt=known[:5], output=known[5:])))
    bench.drain()
    (_, got) = bench.reasons_of(Admitted)
    assert (got.hit, got.cached, got.prompt) == (12, 5, 5)


def shares(bench: Bench) -> list[tuple[int, int, int]]:
    return [(a.hit, a.cached, a.prompt) for a in bench.reasons_of(Admitted)]


def test_who_comes_back_after_a_preemption_counts_no_more() -> None:
    bench = Bench(EngineConfig(num_blocks=8, block_size=4, depth=1, max_num_seqs=4))
    bench.give(Submit(ask("a", 8, 20)), Submit(ask("b", 8, 20, prompt=(5,) * 8)))
    bench.drain()
    assert len(shares(bench)) > 2, "no sample was preempted"
    assert [(cached, prompt) for _, cached, prompt in shares(bench)[:2]] == [
        (0, 8),
        (0, 8),
    ]
    assert {(cached, prompt) for _, cached, prompt in shares(bench)[2:]} == {(0, 0)}
    assert any(hit for hit, _, _ in shares(bench)[2:]), (
        "who comes back meets blocks of its own"
    )
    assert bench.ended["b", 0].cached == 0


def test_each_sample_has_its_own_figure() -> None:
    bench = Bench(CONFIG)
    bench.give(Submit(ask("a", 10, 5, n=3)))
    bench.drain()
    assert shares(bench) == [(0, 0, 10), (8, 8, 10), (8, 8, 10)]
    assert [bench.ended["a", sample].cached for sample in range(3)] == [0, 8, 8]


def test_a_policy_hears_of_a_later_round_of_a_search_too() -> None:
    bench = Bench(evolve(CONFIG, policy=Listener()))
    bench.give(Submit(ask("a", 6, 5)))
    place = (*bench.state.requests["a"].place[:2], 1)
    bench.give(Submit(ask("next", 6, 1, continuation=Continuation(place=place))))
    bench.drain()
    assert len(bench.state.policy) == 2
