"""The table of a sample's life: the docs show it, the worlds walk all of it."""

from collections import Counter
from pathlib import Path

import pytest

from minfer.lifecycle.transitions import TRANSITIONS, Cause, Stage, diagram
from tests.core.world import run_swarm

DOCS = Path(__file__).parents[3] / "minfer" / "README.md"


def test_the_docs_hold_what_is_drawn_from_the_table() -> None:
    shown = DOCS.read_text("utf-8").partition("```mermaid\n")[2].partition("\n```")[0]
    assert shown == diagram(), (
        "put the output of minfer.lifecycle.transitions.diagram() into minfer/README.md"
    )


def test_a_changed_table_is_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    before = diagram()
    monkeypatch.delitem(TRANSITIONS, (Stage.WAITING, Cause.FINISHED))
    assert diagram() != before


def test_every_stage_can_be_reached_and_left_but_the_last() -> None:
    sources, targets = {source for source, _ in TRANSITIONS}, set(TRANSITIONS.values())
    assert targets == set(Stage) - {Stage.NEW}
    assert sources == set(Stage) - {Stage.ENDED}
    assert {cause for _, cause in TRANSITIONS} == set(Cause)


@pytest.mark.long
def test_worlds_make_every_move() -> None:
    made: Counter[tuple[Stage, Cause]] = Counter()
    for seed in range(60):
        made += run_swarm(seed, 40).ledger.books.moves
        if made.keys() == TRANSITIONS.keys():
            return
    assert made.keys() == TRANSITIONS.keys(), (
        f"never made: {TRANSITIONS.keys() - made.keys()}"
    )
