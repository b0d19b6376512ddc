"""Tables grow in time, a quarter block early if they can; and who gives way if they
cannot.
"""

from typing import Any

from attrs import evolve

from minfer.blocks.ownership import Transaction
from minfer.planning.grow import _grow_or_preempt, _has_results_in_flight, grow_for_drafts
from minfer.planning.spread import deferrable_blocks
from minfer.records.config import EngineConfig
from minfer.records.messages import Preempted, Submit
from minfer.records.policy import FirstCome
from minfer.records.state import EngineState
from tests.core.test_engine import CONFIG, Bench, ask

WIDE = evolve(CONFIG, block_size=8, num_blocks=64)


def grown(bench: Bench) -> list[tuple[int, int, int]]:
    """Position at the step's start, entry, and how many blocks of what the last plan
    grew.
    """
    plan = bench.plans[-1]
    starts = dict(zip(plan.rows, plan.starts, strict=True))
    return [(starts[grow.row], grow.at, len(grow.blocks)) for grow in plan.grows]


def test_with_blocks_to_spare_a_table_grows_early_and_once() -> None:
    bench = Bench(WIDE)
    bench.give(Submit(ask("a", 3, 40)))
    seen = []
    for _ in range(38):
        bench.turn()
        seen += grown(bench)
    assert seen == [(6, 1, 1), (14, 2, 1), (22, 3, 1), (30, 4, 1), (38, 5, 1)]


def test_with_few_blocks_a_table_grows_when_it_has_to() -> None:
    bench = Bench(evolve(WIDE, num_blocks=6))
    bench.give(Submit(ask("a", 3, 40)))
    seen = []
    while bench.state.requests:
        bench.turn()
        if bench.state.requests:
            seen += grown(bench)
    assert seen[0] == (6, 1, 1), "five are left, and one who runs"
    assert seen[-1] == (40, 5, 1), "the last block is taken when it is needed"
    assert bench.ended["a", 0].length == 40


def test_the_last_token_needs_no_block() -> None:
    bench = Bench(evolve(WIDE, num_blocks=2))
    bench.give(Submit(ask("a", 3, 14)))
    bench.drain()
    assert not any(plan.grows[1:] for plan in bench.plans)
    assert bench.ended["a", 0].length == 14


def test_tables_that_end_together_grow_a_few_at_a_time() -> None:
    config = evolve(WIDE, block_size=16, max_num_seqs=6, num_blocks=64)
    bench = Bench(config)
    bench.give(*(Submit(ask(f"r{n}", 2, 40)) for n in range(6)))
    most = 0
    for _ in range(20):
        bench.turn()
        most = max(most, len(bench.plans[-1].grows))
    assert most == deferrable_blocks(config, 6) == 2
    assert {len(table) for (table,) in bench.state.running.tables} == {2}


def test_a_row_that_cannot_grow_waits_for_fenced_blocks_and_preempts_none() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, depth=2))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while bench.state.requests:
        had = bench.state.fences
        bench.turn()
        gone = [r for r in bench.reasons if isinstance(r, Preempted)]
        bench.reasons.clear()
        assert len(gone) <= 1
        assert not (gone and set(had) & set(bench.state.fences))


class Second(FirstCome):
    """Preempts the second, not the last."""

    def victim(self, state: Any, ranks: tuple[Any, ...]) -> int:
        del state, ranks
        return 1


def test_the_policys_victim_gives_way_and_is_reported_for_whom() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, policy=Second()))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while not bench.reasons_of(Preempted):
        before = bench.state.running
        bench.turn()
    (gone,) = bench.reasons_of(Preempted)
    assert (gone.id, gone.by) == ("bb", ("a", 0))
    at = before.ids.index(("bb", 0))
    assert gone.known == before.known[at] + 1
    assert gone.computed == gone.known - 1
    assert bench.state.waiting.first().preempted == 1
    bench.drain()
    for name in ("a", "bb", "ccc"):
        assert bench.out[name, 0] == bench.right(ask(name, 8, 24))


def three_with(blocks: int) -> tuple[EngineConfig, EngineState]:
    """Three that run, with nothing in flight and so many blocks left."""
    bench = Bench(evolve(CONFIG, num_blocks=12, policy=Second()))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    bench.turn()
    change = Transaction(bench.state.blocks)
    change.take(change.available - blocks)  # as if others had them
    return bench.config, evolve(bench.state, blocks=change.done(), inflight=())


def one_more(state: EngineState, *places: int) -> dict[int, int]:
    """Tables that need a block more, and how many blocks they have then."""
    return {i: len(state.running.tables[i][0]) + 1 for i in places}


def test_beside_a_paused_one_a_victim_that_is_not_short_is_preempted() -> None:
    flying = Bench(evolve(CONFIG, num_blocks=12))
    flying.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    config, state = three_with(0)
    paused = frozenset({("ccc", 0)})
    state = evolve(state, inflight=flying.state.inflight, paused=paused)
    assert _has_results_in_flight(state, state.running.run_ids[1])
    _, _, (reason,) = _grow_or_preempt(config, state, one_more(state, 0), set())
    assert isinstance(reason, Preempted)
    assert reason.id == "bb"


def test_a_table_that_grew_before_its_sequence_was_preempted_is_not_in_the_plan() -> None:
    config, state = three_with(1)
    _, second, third = state.running.run_ids
    after, grown, (reason,) = _grow_or_preempt(
        config, state, one_more(state, 1, 2), set()
    )
    assert isinstance(reason, Preempted)
    assert (reason.id, second in after.running.run_ids) == ("bb", False)
    assert [*grown] == [(third, 0)]


def test_who_needs_a_block_is_found_where_it_is_once_another_gave_way() -> None:
    """Its position is one less where who gave way was before it."""
    config, state = three_with(0)
    first, second, third = state.running.run_ids
    tables = dict(zip(state.running.run_ids, state.running.tables, strict=True))
    after, grown, (reason,) = _grow_or_preempt(
        config, state, one_more(state, 0, 2), set()
    )
    assert isinstance(reason, Preempted)
    assert (reason.id, after.running.run_ids) == ("bb", (first, third))
    now = dict(zip(after.running.run_ids, after.running.tables, strict=True))
    assert {gen: len(now[gen][0]) - len(tables[gen][0]) for gen in now} == {
        first: 1,
        third: 1,
    }
    assert (second, 0) not in grown


def test_what_a_table_gets_twice_in_a_step_is_reported_as_one() -> None:
    bench = Bench(evolve(CONFIG, block_size=2, num_blocks=64))
    bench.turn(Submit(ask("a", 4, 30)), Submit(ask("bb", 6, 30)))
    config, run = bench.config, bench.state.running
    first, second = ({i: run.scheduled[i] + more for i in range(2)} for more in (3, 7))
    first.pop(1)
    state, grown = grow_for_drafts(config, bench.state, first, {})
    entries = len(run.tables[0][0])
    assert [(one.at, len(one.blocks)) for one in grown.values()] == [(entries, 2)]
    state, grown = grow_for_drafts(config, state, second, grown)
    for i, gen in enumerate(run.run_ids):
        reported, before = grown[gen, 0], len(run.tables[i][0])
        assert (reported.row, reported.at) == (run.rows[i], before)
        assert reported.blocks == state.running.tables[i][0][before:]
        assert len(state.running.tables[i][0]) == -(-second[i] // 2)


def test_where_blocks_are_few_nothing_more_is_taken() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=4))
    bench.turn(Submit(ask("a", 4, 8)))
    run = bench.state.running
    upto = {0: run.scheduled[0] + 20}
    assert grow_for_drafts(bench.config, bench.state, upto, {}) == (bench.state, {})


def test_a_row_that_is_sent_anew_gets_its_table_with_that_and_does_not_grow() -> None:
    both = 0
    for turns in range(8, 20):
        bench = Bench(evolve(WIDE, block_size=16, max_num_seqs=6, num_blocks=64))
        bench.give(*(Submit(ask(f"r{n}", 2, 40)) for n in range(6)))
        for _ in range(turns):
            bench.turn()
        before = [len(table) for (table,) in bench.state.running.tables]
        bench.give(bench.oracle.fail("boom", halfway=False))
        plan = bench.plans[-1]
        both += before != [len(table) for (table,) in bench.state.running.tables]
        assert len(plan.opens) == 6
        assert not plan.grows
    assert both, "some tables grew in a plan that opened their rows"


def test_only_beside_who_is_paused_are_results_waited_for() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.turn(Submit(ask("a")))
    (gen,), state = bench.state.running.run_ids, bench.state
    assert state.inflight
    assert not _has_results_in_flight(state, gen)
    beside = evolve(state, paused=frozenset({("bb", 0)}))
    assert _has_results_in_flight(beside, gen)
    assert not _has_results_in_flight(beside, gen + 1)


def test_a_table_that_reaches_far_enough_gets_no_news() -> None:
    bench = Bench(WIDE)
    bench.turn(Submit(ask("a", 3, 9)))
    bench.turn()
    upto = {0: bench.state.running.scheduled[0] + 1}
    assert grow_for_drafts(bench.config, bench.state, upto, {}) == (bench.state, {})
