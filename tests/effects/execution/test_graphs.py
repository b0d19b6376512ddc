"""When a step may wait for a capture, and which kinds are wanted."""

import torch

from minfer.effects.execution.graphs import MOST_KINDS, OFTEN, PAUSE, GraphCache
from minfer.effects.execution.kinds import Kind

DECODE = Kind(alone=4, draws=4)
PROMPT = Kind(alone=0, draws=1, tokens=64, chunks=1, longest=64)


def cache() -> GraphCache:
    return GraphCache(torch.device("cpu"), 0)


def test_a_step_waits_for_a_capture_only_once_its_kind_has_paid_for_it() -> None:
    graphs = cache()
    for kind in (DECODE, PROMPT):
        assert not graphs.due(kind, 1000)
        graphs.launched[kind] = OFTEN - 1
        assert not graphs.due(kind, 1000)
        graphs.launched[kind] += 1
        assert graphs.due(kind, 1000)


def test_two_captures_do_not_follow_one_another() -> None:
    graphs = cache()
    graphs.launched[DECODE] = OFTEN
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
