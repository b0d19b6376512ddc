"""Mutation testing: the swarm catches every bug that is planted, and none where there is none."""

from pathlib import Path

import pytest
from attrs import evolve

from tests.circles import long
from tests.core.planted import BUGS, WORLDS, Bug, find, plant


@pytest.mark.parametrize(
    "bug", [*BUGS[:3], *long(BUGS[3:])], ids=[bug.name.replace(" ", "-") for bug in BUGS]
)
def test_planted_bug_is_caught(bug: Bug) -> None:
    caught = find(bug)
    assert caught is not None, f"nothing objects to: {bug.seen}"
    assert caught.turns > 0


@pytest.mark.parametrize("worlds", [30, *long([WORLDS])])
def test_sound_core_passes_the_same_worlds(worlds: int) -> None:
    assert find(None, worlds) is None


def test_names_and_changes_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 16
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)


def test_text_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="is 0 times in"):
        plant(evolve(BUGS[0], file="keys.py", old="no such text"), tmp_path)


def test_core_that_breaks_at_once_is_no_catch() -> None:
    broken = Bug("broken", "", "keys.py", "out = list(keys)", "out = list(nothing)")
    with pytest.raises(RuntimeError, match="the hunt itself failed"):
        find(broken)
