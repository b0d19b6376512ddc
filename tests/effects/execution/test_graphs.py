"""When a step may wait for a capture, and which kinds are wanted."""

from typing import cast

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.cuda.graphs import (
    MAX_GRAPHS,
    MIN_SPENT_CAPTURES,
    RECENT_CAPTURES,
    GraphCache,
)
from minfer.effects.execution.device.step_shape import StepShape

DECODE = StepShape(decode_rows=4, draws=4)
PROMPT = StepShape(decode_rows=0, draws=1, tokens=64, chunks=1, longest=64)
GRAPH = cast("torch.cuda.CUDAGraph", object())  # a stand-in


def cache() -> GraphCache:
    return GraphCache(torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("launch", "uses"),
    [(0.010, 2), (0.005, 2), (0.004, 3), (0.001, 6), (5.0, 2)],
    ids=["alike", "half", "less", "a tenth", "compiled"],
)
def test_a_shape_is_captured_when_it_comes_again(launch: float, uses: int) -> None:
    """Or later, if captures take much longer than launches: here 0.01 s."""
    graphs = cache()
    graphs.costs.extend([0.01] * RECENT_CAPTURES)
    for shape in (DECODE, PROMPT):
        for _ in range(uses - 1):
            assert not graphs.is_due(shape)
            graphs.note(shape, launch)
        assert graphs.is_due(shape)


def test_no_step_waits_longer_than_launches_of_its_shape_have_taken() -> None:
    graphs = cache()
    for capture in (0.01, 0.04, 0.3):
        graphs.costs.extend([capture] * RECENT_CAPTURES)
        for launch in (0.001, 0.007, 0.05, 0.2):
            graphs.forget(DECODE)
            launches = 0
            while not graphs.is_due(DECODE):
                graphs.note(DECODE, launch)
                launches += 1
            assert capture <= launches * launch / MIN_SPENT_CAPTURES + 1e-9


def test_what_is_captured_or_forgotten_is_not_due() -> None:
    graphs = cache()
    graphs.note(DECODE, 99.0)
    graphs.note(PROMPT, 99.0)
    graphs.forget(DECODE)
    assert not graphs.is_due(DECODE)
    assert graphs.wanted() == [PROMPT]
    graphs.add(PROMPT, GRAPH)
    assert not graphs.is_due(PROMPT)


def test_deferred_draws_are_captured_when_they_come_again() -> None:
    """They are few launches, however long other captures take."""
    graphs, deferred = cache(), StepShape(decode_rows=0, draws=8, deferred_draws=True)
    graphs.costs.extend([0.04] * RECENT_CAPTURES)
    graphs.note(deferred, 0.0005)
    graphs.note(DECODE, 0.0005)
    assert graphs.is_due(deferred)
    assert not graphs.is_due(DECODE)


def test_what_came_most_often_is_wanted_first_and_nothing_twice() -> None:
    graphs = cache()
    graphs.launched.update({PROMPT: 2, DECODE: 5})
    assert graphs.wanted() == [DECODE, PROMPT]
    graphs.add(DECODE, GRAPH)
    assert graphs.wanted() == [PROMPT]
    assert not graphs.is_due(DECODE)


def foreseen(graphs: GraphCache) -> list[StepShape]:
    """As many kinds as there is room for, added before any step asked for them."""
    shapes = [
        StepShape(decode_rows=0, draws=1, tokens=tokens + 1, chunks=2)
        for tokens in range(MAX_GRAPHS)
    ]
    for shape in shapes:
        assert graphs.may_foresee(shape)
        graphs.add(shape, GRAPH)
    return shapes


def test_only_pure_decode_steps_are_foreseen_beyond_the_bound() -> None:
    graphs = cache()
    shapes = foreseen(graphs)
    drafting = StepShape(decode_rows=1, draws=1, verified=1, drafts=2)
    assert not graphs.may_foresee(PROMPT)
    assert not graphs.may_foresee(drafting)
    assert graphs.may_foresee(DECODE)
    graphs.add(DECODE, GRAPH)
    assert {*graphs.graphs} == {DECODE, *shapes}


def test_a_kind_that_was_requested_takes_the_place_of_the_least_useful() -> None:
    """First of those without a replay, the last captured; then the oldest replay."""
    graphs = cache()
    shapes = foreseen(graphs)
    for shape in reversed(shapes[1:]):
        assert graphs.find(shape) is GRAPH
    leaving = [shapes[0], *reversed(shapes[1:])]
    assert graphs.find(shapes[-1]) is GRAPH  # replayed again
    leaving.remove(shapes[-1])
    for number, dropped in enumerate(leaving[:3]):
        requested = evolve(PROMPT, tokens=1000 + number)
        graphs.note(requested, 1.0)
        assert requested in graphs.wanted()
        graphs.add(requested, GRAPH)
        graphs.forget(requested)
        assert graphs.find(dropped) is None
        assert len(graphs.graphs) == MAX_GRAPHS
    assert {*leaving[3:], shapes[-1]} <= {*graphs.graphs}


def test_of_graphs_without_a_replay_the_last_captured_leaves_first() -> None:
    graphs = cache()
    shapes = foreseen(graphs)
    for number in range(3):
        requested = evolve(PROMPT, tokens=1000 + number)
        graphs.note(requested, 1.0)
        graphs.add(requested, GRAPH)
    assert [shape for shape in shapes if shape not in graphs.graphs] == shapes[-3:]


def test_pure_decode_steps_keep_their_graphs() -> None:
    graphs = cache()
    graphs.add(DECODE, GRAPH)
    for tokens in range(2 * MAX_GRAPHS):
        shape = evolve(PROMPT, tokens=tokens + 1)
        graphs.note(shape, 1.0)
        graphs.add(shape, GRAPH)
    assert graphs.find(DECODE) is GRAPH
    assert len(graphs.graphs) == MAX_GRAPHS
