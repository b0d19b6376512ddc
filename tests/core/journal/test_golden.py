"""The golden journal replays as it was decided: see tests/core/golden.py."""

import json
import zlib

import pytest

from minfer.journal.format import FORMAT, MAGIC, JournalError
from minfer.journal.reading import payloads
from minfer.journal.replay import Journal, open_segments
from tests.core.golden import FILE, FIRST_TURN, contents, golden
from tests.core.journal.made import record


def test_the_golden_journal_replays_without_a_divergence() -> None:
    journal = golden()
    assert journal.state.tiers.transfers, "its first state is one with tiers at work"
    turns = sum(1 for _ in journal.turns())
    assert turns == journal.count - FIRST_TURN > 150
    assert journal.closed
    assert journal.checked == 1


@pytest.mark.long
def test_the_golden_journal_has_everything_in_it() -> None:
    counts = contents()
    assert {name for name, count in counts.items() if count == 0} == set()
    assert counts["groups"] > 1


@pytest.mark.parametrize("number", range(1, FORMAT))
def test_a_journal_of_an_older_format_is_refused_by_its_number(number: int) -> None:
    head, *_ = payloads(FILE.read_bytes(), FILE.name)
    parsed = json.loads(zlib.decompress(head[1:])) | {"format": number}
    older = MAGIC + record(b"H" + zlib.compress(json.dumps(parsed).encode()))
    with pytest.raises(JournalError) as caught:
        Journal(open_segments({"older.journal": older}))
    assert str(caught.value) == (
        f"older.journal: this journal has format {number}, and this minfer reads format "
        f"{FORMAT}; replay it with minfer 0.1.0 (commit 964bfc75), the last that reads it"
    )
