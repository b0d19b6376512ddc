"""Names in journals: none changes unnoticed, and renamed records keep theirs."""

import json
import re
import zlib
from typing import Any, Final

import attrs
import pytest

from minfer.journal import wire_names
from minfer.journal.codec import RECORDS, CodecError, dump, load
from minfer.journal.decisions import chained, columns_of, compact, facts
from minfer.journal.format import MAGIC, START, Head, JournalError
from minfer.journal.projection import state_digest
from minfer.journal.reading import payloads
from minfer.journal.wire_names import (
    LAST_READER,
    REMOVED,
    RemovedError,
    name_of,
    without_removed,
)
from minfer.journal.writing import encode_journal, head_record
from minfer.records.config import EngineConfig
from minfer.records.messages import QueueBlocked
from minfer.records.state import BlockedHead, Transition
from tests.core.journal.made import opened, record
from tests.core.journal.wire_names import FILE, found
from tests.core.recorded import recorded


def test_no_name_changes_unnoticed() -> None:
    """If this fails, a class or field was renamed, and its old name has to be added to
    `minfer.journal.wire_names`; or records or fields are new, or removed there: then
    write the file anew.
    """
    assert found() == FILE.read_text()


def renamed(kind: type, name: str, **fields: str) -> Any:
    """A stand-in for a class that has a new name, as have some of its fields."""
    parts = {
        fields.get(one.name, one.name): attrs.field(default=one.default)
        for one in attrs.fields(kind)
    }
    return attrs.make_class(name, parts, frozen=True)


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`QueueBlocked`, were it renamed, and two of its fields."""
    names = {"cause": "blocked_by", "needs": "missing"}
    kind = renamed(QueueBlocked, "Deferred", **names)
    monkeypatch.setitem(wire_names.CLASSES, "Held", kind)
    monkeypatch.setitem(wire_names.FIELDS, "Held", names)
    return kind


def test_facts_of_a_renamed_reason_are_the_same(deferred: Any) -> None:
    _, turns = recorded(8)
    turn = next(
        turn
        for turn in turns
        if any(isinstance(one, QueueBlocked) for one in turn.transition.reasons)
    )
    was = turn.transition
    reasons: Any = [
        deferred(*attrs.astuple(one)) if isinstance(one, QueueBlocked) else one
        for one in was.reasons
    ]
    now = Transition(was.state, was.commands, tuple(reasons))
    reported, again = compact(facts(turn.before, was)), compact(facts(turn.before, now))
    assert b'"Held"' in reported
    assert again == reported
    assert chained(START, now, again) == chained(START, was, reported)
    assert columns_of(deferred) == ("id", "sample", "cause", "needs", "available")


def test_a_snapshot_with_a_renamed_record_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(8)
    state = next(turn.before for turn in turns if turn.before.blocked)
    hold: Any = state.blocked
    reported, digest = dump(state), state_digest(state)
    written = head_record(Head(config=config, turn=1, state=state))
    kind = renamed(BlockedHead, "Deferral", place="position")
    kind.place = property(lambda self: self.position)  # for code that is as it was
    monkeypatch.setitem(wire_names.CLASSES, "Hold", kind)
    monkeypatch.setitem(wire_names.FIELDS, "Hold", {"place": "position"})
    now = attrs.evolve(state, blocked=kind(hold.place, hold.cause))
    assert json.dumps(dump(now)) == json.dumps(reported)
    assert state_digest(now) == digest
    assert head_record(Head(config=config, turn=1, state=now)) == written
    assert load(reported, {**RECORDS, "Hold": kind}) == now


def test_a_policy_of_a_program_keeps_its_own_name(deferred: Any) -> None:
    mine = attrs.make_class("Deferred", ["seconds"], frozen=True)
    assert (name_of(deferred), name_of(mine)) == ("Held", "Deferred")
    assert dump(mine(2)) == {"is": "Deferred", "seconds": 2}
    assert load(dump(mine(2)), {"Deferred": mine}) == mine(2)


# --- what is not supported any more -----------------------------------------------------

GONE: dict[tuple[str, str], tuple[Any, Any, str]] = {  # what is read, what is not, why
    ("EngineConfig", "max_repeat"): (1, 2, "max_repeat above 1"),
    ("Plan", "moves"): ([], [[1, 2]], "blocks moved by plans"),
    ("Plan", "repeat"): (1, 5, "max_repeat above 1"),
    ("EngineState", "searches"): ({"map": []}, {"map": [["a", {}]]}, "beam search"),
    ("Request", "beams"): (None, {"is": "BeamSearch"}, "beam search"),
    ("Executed", "candidates"): ([], [{"is": "Candidates"}], "beam search"),
    ("RowSampling", "candidates"): (0, 4, "beam search"),
    ("Executed", "scores"): ([], [[-0.5]], "scores of tokens"),
    ("RowSampling", "scores"): (False, True, "scores of tokens"),
}


@pytest.mark.parametrize(("record_", "field"), GONE)
def test_a_removed_field_is_read_with_one_value(record_: str, field: str) -> None:
    neutral, other, why = GONE[record_, field]
    assert without_removed(record_, {field: neutral, "id": "a"}) == {"id": "a"}
    with pytest.raises(RemovedError, match=f"^{why}: .* is the last that reads it$"):
        without_removed(record_, {field: other, "id": "a"})


def test_of_thresholds_one_is_still_read() -> None:
    parsed = dump(EngineConfig(num_blocks=3))
    assert load({**parsed, "thresholds": {"is": "Thresholds"}}) == load(parsed)
    old = {"is": "Thresholds", "freed_run": 2, "stop_ids": 3}
    assert load({**parsed, "thresholds": old}) == EngineConfig(num_blocks=3, freed_run=2)
    assert without_removed("Line", {"full": 3, "size": 2}) == {"size": 2}
    every = {(name, field) for name, gone in REMOVED.items() for field in gone}
    replaced = {("EngineConfig", "thresholds"), ("Line", "full"), *REPLACED}
    assert every - GONE.keys() == replaced
    with pytest.raises(CodecError, match="unexpected keyword"):
        load({**parsed, "more": 1})


QUEUES: Final[tuple[Any, Any]] = (
    {"is": "Queue", "runs": {"map": []}, "size": 0},
    {
        "is": "Queue",
        "runs": {"map": [[0, [{"hex": "aa"}, {"hex": "ab"}]]]},
        "size": 2,
    },
)
# What records of one group of layers had, and what they have now.
REPLACED: dict[tuple[str, str], tuple[Any, Any]] = {
    ("EngineConfig", "window"): (
        9,
        {"groups": [{"is": "CacheGroup", "window": 9}], "reserve_windows": True},
    ),
    ("Chain", "low"): (2, {"low_by_group": [2]}),
    ("Chain", "sealed"): (3, {"sealed_by_group": [3]}),
    ("PrefixIndex", "nodes"): (
        {"map": [[{"hex": "aa"}, [7, {"hex": ""}, 1, 0, -1]]]},
        {"pages": {"map": [[{"hex": "aa"}, [[7], {"hex": ""}, 1, 0, -1]]]}},
    ),
    ("Running", "tables"): (
        [{"is": "Log", "old": [1]}, {"is": "Log"}],
        {"tables_by_group": [[{"is": "Log", "old": [1]}], [{"is": "Log"}]]},
    ),
    # Queues, which were tuples.
    ("Tiers", "unstored"): ([], {"host_queue": QUEUES[0]}),
    ("Tiers", "unsaved"): ([{"hex": "aa"}, {"hex": "ab"}], {"keyed_queue": QUEUES[1]}),
}


@pytest.mark.parametrize(("record_", "field"), REPLACED)
def test_a_field_that_was_replaced_is_read_as_the_new_one(
    record_: str, field: str
) -> None:
    old, new = REPLACED[record_, field]
    assert without_removed(record_, {field: old}) == new


def with_names_of_one_group(value: Any) -> Any:
    """A snapshot as engines wrote it that knew one group of layers."""
    if isinstance(value, list):
        return [with_names_of_one_group(one) for one in value]
    if not isinstance(value, dict):
        return value
    told = {key: with_names_of_one_group(one) for key, one in value.items()}
    match told.get("is"):
        case "Chain":
            for name in ("low", "sealed"):
                if by_group := told.pop(f"{name}_by_group", None):
                    (told[name],) = by_group
        case "Running" if "tables_by_group" in told:
            told["tables"] = [table for (table,) in told.pop("tables_by_group")]
        case "PrefixIndex" if "pages" in told:
            pairs = told.pop("pages")["map"]
            told["nodes"] = {"map": [[key, [one[0][0], *one[1:]]] for key, one in pairs]}
            told.pop("cached", None)
        case "EngineConfig" if "groups" in told:
            (group,) = told.pop("groups")
            told["window"] = group["window"]
            assert "sink_tokens" not in group, "engines of one group had none"
            told.pop("reserve_windows", None)
    return told


@pytest.mark.parametrize("seed", [8, 12, 17])
def test_a_snapshot_of_one_group_is_read(seed: int) -> None:
    config, turns = recorded(seed)
    [group] = config.groups
    config = attrs.evolve(
        config,
        groups=(attrs.evolve(group, sink_tokens=0),),
        reserve_windows=group.window > 0,
    )
    state = turns[25].before
    told = with_names_of_one_group(dump(state))
    assert len(state.running)
    assert "tables_by_group" not in json.dumps(told)
    assert load(told) == state
    assert load(with_names_of_one_group(dump(config))) == config


def of_format_3(config: str, state: str, request: str) -> bytes:
    """A journal with more fields in its configuration, snapshot and requests."""
    settings, turns = recorded(8, 20)
    head, *rest = payloads(encode_journal(settings, turns[5:]), "run")
    parsed = json.loads(zlib.decompress(head[1:]))
    parsed["format"] = 3
    parsed["config"] |= json.loads(config)
    parsed["state"] |= json.loads(state)
    old = b'"is":"Submit","request":{'
    rest = [one.replace(old, old + request.encode()) for one in rest]
    changed = b"H" + zlib.compress(json.dumps(parsed).encode())
    return MAGIC + b"".join(map(record, (changed, *rest)))


READ = ('{"max_repeat": 1}', '{"searches": {"map": []}}', '"beams":null,')
WRONG = ('{"max_repeat": 2}', '{"searches": {"map": [["a", 1]]}}', '"beams":{"is":"B"},')


def test_a_journal_of_format_3_with_neither_beams_nor_repeats_replays() -> None:
    assert [*opened(of_format_3(*READ)).turns()] == recorded(8, 20)[1][5:]


@pytest.mark.parametrize("part", range(3), ids=["config", "state", "request"])
def test_a_journal_with_what_is_removed_is_refused_with_its_last_reader(
    part: int,
) -> None:
    parts = [*READ]
    parts[part] = WRONG[part]
    with pytest.raises(JournalError) as caught:
        [*opened(of_format_3(*parts)).turns()]
    what = "beam search" if part else "max_repeat above 1"
    turn = r"turn \d+: " if part == 2 else ""
    why = rf"run: {turn}journal of format 3 with {what}: {re.escape(LAST_READER)} is "
    assert re.fullmatch(why + "the last that reads it", str(caught.value))
