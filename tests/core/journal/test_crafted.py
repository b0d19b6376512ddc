"""Journals with wrong content behind right checksums: each reader refuses them by name,
with the file and the place.
"""

from collections import Counter
from functools import cache

import pytest

from minfer.journal.format import JournalError
from minfer.journal.replay import DivergenceError, Journal, open_segments
from minfer.journal.routing_journal import RoutingDivergenceError, RoutingJournal
from minfer.journal.turns import EngineRaisedError
from minfer.journal.writing import encode_journal
from minfer.routing.policies import Prefix
from tests.circles import claimed
from tests.core.golden import FILE as GOLDEN
from tests.core.journal.crafted import crafted, crafted_lines
from tests.core.journal.test_routing_journal import recorded as routed
from tests.core.recorded import recorded, storm

FILE = "crafted.journal"


@cache
def journals() -> tuple[bytes, ...]:
    """One from the beginning with tiers, one from its midst, and one of a storm."""
    config, turns = recorded(5, 60)
    assert config.has_tiers
    whole, midst = encode_journal(config, turns[:30]), encode_journal(config, turns[50:])
    return whole, midst, GOLDEN.read_bytes(), encode_journal(*storm(12, 80))


def read(data: bytes) -> str:
    """What comes of reading a journal with all that reads one."""
    kind, what = "read", f"{FILE}: turn "
    try:
        journal = Journal(open_segments({FILE: data}))
        journal.request_ids()
        for _ in journal.turns():
            pass
        journal.request_ids(strict=True)
    except DivergenceError as error:
        kind, what = "divergence", str(error)
    except EngineRaisedError as error:
        kind, what = "raised", str(error)
    except JournalError as error:
        kind, what = "refused", str(error)
    places = (
        "turn ",
        "format",
        "head",
        "record",
        "lines",
        "snapshot",
        "configuration",
        "last",
    )
    assert what.startswith(FILE)
    assert any(place in what for place in places), what
    assert len(what) < 1500, what
    return kind


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(200), *claimed([range(200, 8000)])])
def test_what_is_wrong_behind_a_right_checksum_is_refused_by_name(seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        every = journals()
        data = crafted(every[seed % len(every)], seed)
        try:
            seen[read(data)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert min(seen["divergence"], seen["refused"], seen["read"]) > 5, seen


def read_routing(data: bytes) -> str:
    kind, what = "read", "turn "
    try:
        for _ in RoutingJournal(data).turns():
            pass
    except RoutingDivergenceError as error:
        kind, what = "divergence", str(error)
    except JournalError as error:
        kind, what = "refused", str(error)
    assert any(place in what for place in ("turn ", "head", "journal", "its end")), what
    assert len(what) < 1500, what
    return kind


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(300), *claimed([range(300, 4000)])])
def test_a_wrong_journal_of_a_router_is_refused_by_name(seeds: range) -> None:
    seen, (data, _) = Counter[str](), routed(Prefix(), turns=30)
    for seed in seeds:
        try:
            seen[read_routing(crafted_lines(data, seed))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert min(seen.values()) > 5, seen
    assert len(seen) == 3, seen
