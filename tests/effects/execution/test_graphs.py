"""When a step may wait for a capture, and which kinds are wanted."""

import pytest
import torch

from minfer.effects.execution.graphs import (
    ASKED,
    MOST_KINDS,
    PAUSE,
    PRICE,
    RECENT,
    WORTH,
    GraphCache,
    pays,
)
from minfer.effects.execution.kinds import Kind

DECODE = Kind(alone=4, draws=4)
PROMPT = Kind(alone=0, draws=1, tokens=64, chunks=1, longest=64)


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
    graphs.costs.extend([0.01] * RECENT)
    for kind in (DECODE, PROMPT):
        graphs.note(kind, 100.0)
        assert not graphs.due(kind, 1000), "the first launch may have compiled something"
        graphs.note(kind, WORTH * 0.01)
        assert not graphs.due(kind, 1000)
        graphs.note(kind, 0.001)
        assert graphs.due(kind, 1000)
    graphs.costs.extend([0.02] * RECENT)
    assert not graphs.due(DECODE, 1000), "captures take longer now"
    graphs.costs.extend([0.01] * RECENT)
    graphs.forget(DECODE)
    assert not graphs.due(DECODE, 1000)
    assert graphs.wanted() == [PROMPT]


def test_what_takes_few_launches_is_captured_after_few_steps() -> None:
    graphs, late = cache(), Kind(alone=0, draws=8, late=True)
    graphs.costs.extend([0.04] * RECENT)
    steps = 0
    while not graphs.due(late, 1000):
        graphs.note(late, 0.0005)
        steps += 1
    assert steps == 1 + WORTH * PRICE + 1
    for _ in range(9):
        assert not graphs.due(DECODE, 1000), "a capture of others takes what it takes"
        graphs.note(DECODE, 0.02)


def test_two_captures_do_not_follow_one_another() -> None:
    graphs = cache()
    for _ in range(2):
        graphs.note(DECODE, 99.0)
    graphs.last = 1000
    assert not graphs.due(DECODE, 1000 + PAUSE / 2)
    assert graphs.due(DECODE, 1000 + PAUSE)


def test_what_came_most_often_is_wanted_first_and_nothing_twice() -> None:
    graphs = cache()
    graphs.launched.update({PROMPT: 2, DECODE: 5})
    assert graphs.wanted() == [DECODE, PROMPT]
    graphs.made[DECODE] = None  # type: ignore[assignment]  # a stand-in
    assert graphs.wanted() == [PROMPT]
    assert not graphs.due(DECODE, 1e9)


def test_rows_that_feed_themselves_have_room_when_others_have_none() -> None:
    graphs = cache()
    for tokens in range(MOST_KINDS):
        kind = Kind(alone=0, draws=1, tokens=tokens + 1, chunks=1)
        graphs.made[kind] = None  # type: ignore[assignment]  # a stand-in
    assert graphs.may_have(DECODE)
    assert not graphs.may_have(PROMPT)


def test_rests_leave_room_for_kinds_that_are_asked_for() -> None:
    graphs = cache()
    for tokens in range(MOST_KINDS - ASKED):
        assert graphs.may_foresee(PROMPT)
        kind = Kind(alone=0, draws=1, tokens=tokens + 1, chunks=2)
        graphs.made[kind] = None  # type: ignore[assignment]  # a stand-in
    assert not graphs.may_foresee(PROMPT)
    assert graphs.may_foresee(DECODE)
    graphs.note(PROMPT, 1.0)
    assert graphs.wanted() == [PROMPT]


def test_kinds_with_drafts_are_as_rare_as_those_of_prompts() -> None:
    graphs = cache()
    drafting = Kind(alone=1, draws=1, verified=1, drafts=2)
    for tokens in range(MOST_KINDS - ASKED):
        kind = Kind(alone=0, draws=1, tokens=tokens + 1, chunks=2)
        graphs.made[kind] = None  # type: ignore[assignment]  # a stand-in
    assert not graphs.may_foresee(drafting)
    assert graphs.may_have(drafting)
