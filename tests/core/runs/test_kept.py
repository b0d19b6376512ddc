"""Journals that earlier engines wrote replay as they were decided: see kept.py."""

from pathlib import Path

import pytest

from tests.core.kept import content, kept, read


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.stem)
def test_a_kept_journal_replays_without_a_divergence(path: Path) -> None:
    journal = read(path)
    turns = sum(1 for _ in journal.turns())
    assert turns == journal.count > 50
    assert journal.closed
    if path.name.startswith("format2-"):
        assert journal.by_decisions_alone
        assert journal.checked == 0
    else:
        assert not journal.by_decisions_alone
        assert journal.checked == 1


def test_kept_journals_have_everything_in_them() -> None:
    seen = content()
    for what in (
        "cancels",
        "samples",
        "preemptions",
        "failures",
        "window",
        "repeat",
        "shares",
    ):
        assert seen[what] > 3, what
    for policy in (
        "FirstCome",
        "Priority",
        "Ageing",
        "Shortest",
        "Fair",
        "FairQueue",
        "FairSeats",
        "Window",
    ):
        assert seen[policy], policy
