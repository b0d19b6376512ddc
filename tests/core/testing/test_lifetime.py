"""The table of a sample's life: the docs show it, the worlds walk all of it."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from minfer.testing.lifetime import MOVES, Cause, Stage, diagram
from tests.core.world import World, run_swarm, tiny_config

DOCS = Path(__file__).parents[3] / "minfer" / "README.md"


def test_the_docs_hold_what_is_drawn_from_the_table() -> None:
    shown = DOCS.read_text("utf-8").partition("```mermaid\n")[2].partition("\n```")[0]
    assert shown == diagram(), (
        "put the output of minfer.testing.lifetime.diagram() into minfer/README.md"
    )


def test_a_changed_table_is_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    before = diagram()
    monkeypatch.delitem(MOVES, (Stage.WAITING, Cause.FINISHED))
    assert diagram() != before


def test_every_stage_can_be_reached_and_left_but_the_last() -> None:
    sources, targets = {source for source, _ in MOVES}, set(MOVES.values())
    assert targets == set(Stage) - {Stage.NEW}
    assert sources == set(Stage) - {Stage.ENDED}
    assert {cause for _, cause in MOVES} == set(Cause)


def poisoned_searches(seed: int) -> World:
    """A world of beam searches, of many of which every step fails."""
    rng = Random(seed)
    world = World(tiny_config(rng), rng, searching=0.9, poisonous=0.3)
    world.hungry = True
    for _ in range(40):
        if rng.random() < 0.3:
            world.burst(3)
        if rng.random() < 0.1:
            world.fail()
        world.turn()
    world.drain()
    return world


def test_worlds_make_every_move() -> None:
    made: Counter[tuple[Stage, Cause]] = Counter()
    for seed in range(120, 240):  # searches end as a whole, those in line included
        made += poisoned_searches(seed).ledger.books.moves
        if made[Stage.PREEMPTED, Cause.BLAMED]:
            break
    for seed in range(60):
        made += run_swarm(seed, 40).ledger.books.moves
        if made.keys() == MOVES.keys():
            return
    assert made.keys() == MOVES.keys(), f"never made: {MOVES.keys() - made.keys()}"
