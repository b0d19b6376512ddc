"""Planted bugs: each is caught, by the swarm or by its tests, and nothing where there is
none.
"""

from pathlib import Path

import pytest
from attrs import evolve

from tests.circles import claimed
from tests.core.planted import BUGS, ESCAPED, WORLDS, Bug, find

ALL = (*BUGS, *ESCAPED)


def names(bugs: tuple[Bug, ...]) -> list[str]:
    return [bug.name.replace(" ", "-") for bug in bugs]


@pytest.mark.parametrize("bug", [*BUGS[:1], *claimed(BUGS[1:])], ids=names(BUGS))
def test_planted_bug_is_caught(bug: Bug) -> None:
    caught = find(bug)
    assert caught is not None, f"nothing objects to: {bug.seen}"
    assert bug.tests or caught.turns > 0


@pytest.mark.parametrize("bug", [*ESCAPED[:1], *claimed(ESCAPED[1:])], ids=names(ESCAPED))
def test_bug_that_once_escaped_is_caught(bug: Bug) -> None:
    caught = find(bug)
    assert caught is not None, f"nothing in {bug.tests} objects"


@pytest.mark.parametrize("worlds", [4, *claimed([WORLDS])])
def test_sound_core_passes_the_same_worlds(worlds: int) -> None:
    assert find(None, worlds) is None


def test_names_and_changes_are_unique() -> None:
    assert len({bug.name for bug in ALL}) == len(ALL) >= 16
    assert len({(bug.file, bug.function, bug.old, bug.new) for bug in ALL}) == len(ALL)


@pytest.mark.parametrize("bug", ALL, ids=names(ALL))
def test_the_place_of_each_bug_is_there(bug: Bug) -> None:
    bug.check()


def test_the_tests_that_catch_a_bug_are_there() -> None:
    folder = Path(__file__).parent
    files = {bug.tests for bug in ALL if bug.tests}
    assert {file for file in files if not (folder / file).is_file()} == set()


def test_a_place_that_is_gone_is_reported() -> None:
    with pytest.raises(LookupError, match="0 times in block_key"):
        evolve(
            BUGS[0],
            file="blocks/keys.py",
            function="block_key",
            old="no.such.text",
            new="1",
        ).check()
    with pytest.raises(LookupError, match="no function nothing"):
        evolve(BUGS[0], function="nothing").check()


def test_layout_and_comments_of_the_place_do_not_matter() -> None:
    bug = next(bug for bug in BUGS if bug.name == "fence ignored")
    evolve(bug, old="(last_step\n is   # not yet\n None)").check()
    with pytest.raises(LookupError, match="0 times"):
        evolve(bug, old="last_step is not None").check()


@pytest.mark.long
def test_core_that_breaks_at_once_is_no_catch() -> None:
    broken = Bug(
        "broken", "", "blocks/keys.py", "extend_keys", "list(keys)", "list(nothing)"
    )
    with pytest.raises(RuntimeError, match=r"the hunt itself failed[^$]*nothing"):
        find(broken)
