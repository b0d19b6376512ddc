"""When a step may wait for a capture, and which kinds are wanted."""

from typing import cast

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.cuda.graphs import (
    DEFERRED_CAPTURE_LAUNCHES,
    MAX_GRAPHS,
    MIN_PAUSE_SECONDS,
    MIN_SPENT_CAPTURES,
    RECENT_CAPTURES,
    GraphCache,
    pays,
)
from minfer.effects.execution.device.step_shape import StepShape

DECODE = StepShape(decode_rows=4, draws=4)
PROMPT = StepShape(decode_rows=0, draws=1, tokens=64, chunks=1, longest=64)
GRAPH = cast("torch.cuda.CUDAGraph", object())  # a stand-in


def cache() -> GraphCache:
    return GraphCache(torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("launches", "capture", "paid"),
    [
        ([], 0.01, False),
        ([0.005] * 8, 0.01, False),  # as long as four captures
        ([0.005] * 9, 0.01, True),
        ([0.005] * 9, 0.02, False),  # captures take longer here
        ([0.0005] * 79, 0.01, False),  # launches are quick, however many
    ],
)
def test_a_capture_pays_once_launches_took_several_times_as_long(
    launches: list[float], capture: float, *, paid: bool
) -> None:
    assert pays(sum(launches), capture) is paid


def test_a_step_waits_for_a_capture_only_once_its_kind_has_paid_for_it() -> None:
    graphs = cache()
    graphs.costs.extend([0.01] * RECENT_CAPTURES)
    for shape in (DECODE, PROMPT):
        graphs.note(shape, 100.0)
        assert not graphs.is_due(shape, 1000), (
            "the first launch may have compiled something"
        )
        graphs.note(shape, MIN_SPENT_CAPTURES * 0.01)
        assert not graphs.is_due(shape, 1000)
        graphs.note(shape, 0.001)
        assert graphs.is_due(shape, 1000)
    graphs.costs.extend([0.02] * RECENT_CAPTURES)
    assert not graphs.is_due(DECODE, 1000), "captures take longer now"
    graphs.costs.extend([0.01] * RECENT_CAPTURES)
    graphs.forget(DECODE)
    assert not graphs.is_due(DECODE, 1000)
    assert graphs.wanted() == [PROMPT]


def test_what_takes_few_launches_is_captured_after_few_steps() -> None:
    graphs, deferred = cache(), StepShape(decode_rows=0, draws=8, deferred_draws=True)
    graphs.costs.extend([0.04] * RECENT_CAPTURES)
    steps = 0
    while not graphs.is_due(deferred, 1000):
        graphs.note(deferred, 0.0005)
        steps += 1
    assert steps == 1 + MIN_SPENT_CAPTURES * DEFERRED_CAPTURE_LAUNCHES + 1
    for _ in range(9):
        assert not graphs.is_due(DECODE, 1000), "a capture of others takes what it takes"
        graphs.note(DECODE, 0.02)


def test_two_captures_do_not_follow_one_another() -> None:
    graphs = cache()
    for _ in range(2):
        graphs.note(DECODE, 99.0)
    graphs.last_capture = 1000
    assert not graphs.is_due(DECODE, 1000 + MIN_PAUSE_SECONDS / 2)
    assert graphs.is_due(DECODE, 1000 + MIN_PAUSE_SECONDS)


def test_what_came_most_often_is_wanted_first_and_nothing_twice() -> None:
    graphs = cache()
    graphs.launched.update({PROMPT: 2, DECODE: 5})
    assert graphs.wanted() == [DECODE, PROMPT]
    graphs.add(DECODE, GRAPH)
    assert graphs.wanted() == [PROMPT]
    assert not graphs.is_due(DECODE, 1e9)


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
