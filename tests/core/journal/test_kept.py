"""Journals that earlier engines wrote replay as they were decided: see kept.py."""

from pathlib import Path

import pytest

from minfer.journal.format import JournalError
from tests.core.kept import REFUSED, SNAPSHOTS, content, kept, read


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


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_a_journal_goes_on_from_an_old_state_with_tiers(path: Path) -> None:
    """Written when holding a block in host memory counted for all before it, and what was
    to be stored was a tuple.
    """
    journal = read(path)
    first = journal.state.tiers
    assert first.transfers
    assert len(first.host_queue) + len(first.external_queue) > 0
    assert sum(1 for _ in journal.turns()) > 15
    assert journal.checked == 1


def test_a_kept_journal_with_what_was_removed_is_refused_with_its_last_reader() -> None:
    with pytest.raises(JournalError) as caught:
        read(REFUSED)
    assert str(caught.value) == (
        "format3-world-2.journal: journal of format 3 with max_repeat above 1: "
        "minfer 0.1.0 (commit 4be0b7e) is the last that reads it"
    )


@pytest.mark.long
def test_kept_journals_have_everything_in_them() -> None:
    seen = content()
    for what in (
        "cancels",
        "samples",
        "preemptions",
        "failures",
        "window",
        "several groups",
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
