"""Columns: entries taken out, put in at their rank, and changed one by one."""

from typing import Any

import hypothesis.strategies as st
from attrs import evolve
from hypothesis import given

from minfer.records.messages import Submit
from minfer.records.request import SamplingParams
from minfer.records.sequence import (
    COLUMNS,
    Running,
    Sequence,
    edited,
    joined,
    less,
    positions,
    without,
)
from tests.core.test_engine import CONFIG, Bench, ask


def running(*ranks: int) -> Running:
    """Columns of so many sequences; generation and row tell which rank each has."""
    run = Running()
    for rank in ranks:
        run = joined(run, [one(rank)])
    return run


def one(rank: int) -> Running:
    bench = Bench()
    bench.give(Submit(ask("a", 6, 9)))
    run = bench.state.running
    (seq,) = run.seqs
    seq = evolve(seq, place=((float(rank),), rank, 0))
    return evolve(run, seqs=(seq,), run_ids=(rank,), rows=(rank + 100,))


def ranks(run: Running) -> list[int]:
    assert {len(getattr(run, name)) for name in COLUMNS} == {len(run)}
    assert [seq.place[1] for seq in run.seqs] == list(run.run_ids)
    assert [row - 100 for row in run.rows] == list(run.run_ids)
    return list(run.run_ids)


def test_what_is_computed_anew_is_computed_by_the_first_sample_and_once() -> None:
    anew = ask("a", 6, 8, sampling=SamplingParams(prompt_logprobs=0))
    first = Sequence(anew, 0, ((), 0, 0), 0.0, anew.prompt)
    assert not first.reads_cache
    assert evolve(first, history=(*anew.prompt, 1)).reads_cache, "it has output"
    assert evolve(first, sample=1).reads_cache
    assert evolve(first, request=evolve(anew, sampling=SamplingParams())).reads_cache


def test_newcomers_are_put_in_at_their_ranks() -> None:
    run = running(5, 1, 3)
    assert ranks(run) == [1, 3, 5]
    assert ranks(joined(run, [one(0), one(2), one(4), one(6)])) == [0, 1, 2, 3, 4, 5, 6]
    assert ranks(joined(run, [one(6), one(7)])) == [1, 3, 5, 6, 7]
    assert ranks(joined(run, [])) == [1, 3, 5]


def test_who_leaves_is_gone_from_every_column() -> None:
    run = running(0, 1, 2, 3, 4)
    assert ranks(without(run, [0, 2, 4])) == [1, 3]
    assert ranks(without(run, [4])) == [0, 1, 2, 3]
    assert without(run, []) is run


@given(st.lists(st.integers(), max_size=12), st.data())
def test_a_column_without_some_entries(column: list[int], data: st.DataObject) -> None:
    out = sorted(i for i in range(len(column)) if data.draw(st.booleans()))
    kept = tuple(value for i, value in enumerate(column) if i not in out)
    assert less(tuple(column), out) == kept


def test_a_column_of_which_nothing_goes_stays_itself() -> None:
    column = (1, 2, 3)
    assert less(column, []) is column


def test_cells_are_changed_and_nothing_else_is() -> None:
    run = running(0, 1, 2)
    new = edited(run, known={0: 50, 2: 52}, scheduled={})
    assert new.known == (50, run.known[1], 52)
    assert all(
        getattr(new, name) is getattr(run, name) for name in COLUMNS if name != "known"
    )
    assert edited(run, known={}) is run
    assert edited(run) is run


def test_where_generations_are() -> None:
    run = running(7, 3, 5)
    assert positions(run, {7, 5}) == [1, 2]
    assert positions(run, {3, 99}) == [0]
    assert positions(run, ()) == []


def test_all_known_tokens_are_history_named_blocks_tail_and_fresh_ones() -> None:
    for size in (1, 3, 4, 7):
        bench = Bench(evolve(CONFIG, block_size=size, num_blocks=64))
        request = ask("a", 6, 20)
        bench.give(Submit(request))
        for _ in range(12):
            bench.turn()
            out = bench.out.get(("a", 0), ())
            known: Any = bench.state.running.tokens(0, size)
            assert known == request.prompt + out


def test_inputs_are_known_tokens_wherever_they_are_kept() -> None:
    for size in (1, 3, 4):
        bench = Bench(evolve(CONFIG, block_size=size, num_blocks=64))
        bench.give(Submit(ask("a", 6, 20)))
        for _ in range(11):
            bench.turn()
        run = bench.state.running
        tokens = run.tokens(0, size)
        for start in range(len(tokens)):
            for stop in range(start + 1, len(tokens) + 1):
                assert run.inputs(0, start, stop, size) == tokens[start:stop]
