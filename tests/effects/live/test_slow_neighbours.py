"""Neighbours of who needs long for each mask get their tokens at their own pace."""

import pytest
from attrs import evolve

from minfer.records.request import Request
from tests.effects.live.matchers import Clock, ask, counted
from tests.effects.live.slow import CONFIG, SLOW, Engine, plain

PER_MASK = 5  # turns that pass until a slow mask is there


def pace(engine: Engine, *requests: Request) -> list[float]:
    """How many turns a token of each takes, once all have begun. Threads make masks
    within a turn, but for the request "slow", where that takes `PER_MASK`.
    """
    names = [request.id for request in requests]
    before = list[int]()
    engine.post(*requests)
    for _ in range(7):
        for _ in range(PER_MASK):
            engine.turn()
            engine.threads.run(but="slow")
        engine.threads.run()
        before = before or engine.lengths(*names)
    after = engine.lengths(*names)
    for name, length in zip(names, after, strict=True):
        assert name == "p" or engine.tokens[name] == counted(length)
    return [6 * PER_MASK / (b - a) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late_masks", [False, True])
def test_neighbours_of_a_slow_one_keep_their_pace(
    clock: Clock, depth: int, late_masks: bool
) -> None:
    config = evolve(CONFIG, depth=depth, late_masks=late_masks)
    neighbours = plain(), ask("q", max_tokens=60)
    solo = pace(Engine(clock, config), *neighbours)
    engine = Engine(clock, config)
    engine.compiler.costs = [0.0, SLOW]
    beside = pace(engine, *neighbours, ask("slow"))
    assert beside[:2] == pytest.approx(solo, rel=0.1)
    assert beside[0] == 1
    assert beside[2] == pytest.approx(PER_MASK, rel=0.2)
    assert engine.held_up == 0.0


@pytest.mark.parametrize(("depth", "late_masks"), [(1, True), (2, False), (2, True)])
def test_so_do_those_who_all_have_constraints(
    clock: Clock, depth: int, late_masks: bool
) -> None:
    engine = Engine(clock, evolve(CONFIG, depth=depth, late_masks=late_masks))
    engine.compiler.costs = [0.0, 0.0, SLOW]
    turns = pace(engine, ask("q", max_tokens=60), ask("r", max_tokens=60), ask("slow"))
    assert turns == [1, 1, PER_MASK]
    assert engine.held_up == 0.0
