"""Names in journals: none changes unnoticed, and renamed records keep theirs."""

import json
import zlib
from typing import Any

import attrs
import pytest

from minfer.journal import wire_names
from minfer.journal.codec import RECORDS, CodecError, dump, load
from minfer.journal.decisions import columns_of, compact, extend_digest, facts
from minfer.journal.format import MAGIC, START_DIGEST, Head, JournalError
from minfer.journal.projection import state_digest
from minfer.journal.reading import payloads
from minfer.journal.wire_names import Removed, name_of, without_removed
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
    monkeypatch.setitem(wire_names.CLASSES, "QueueBlocked", kind)
    monkeypatch.setitem(wire_names.FIELDS, "QueueBlocked", names)
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
    assert b'"QueueBlocked"' in reported
    assert again == reported
    assert extend_digest(START_DIGEST, now, again) == extend_digest(
        START_DIGEST, was, reported
    )
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
    monkeypatch.setitem(wire_names.CLASSES, "BlockedHead", kind)
    monkeypatch.setitem(wire_names.FIELDS, "BlockedHead", {"place": "position"})
    now = attrs.evolve(state, blocked=kind(hold.place, hold.cause))
    assert json.dumps(dump(now)) == json.dumps(reported)
    assert state_digest(now) == digest
    assert head_record(Head(config=config, turn=1, state=now)) == written
    assert load(reported, {**RECORDS, "BlockedHead": kind}) == now


def test_a_policy_of_a_program_keeps_its_own_name(deferred: Any) -> None:
    mine = attrs.make_class("Deferred", ["seconds"], frozen=True)
    assert (name_of(deferred), name_of(mine)) == ("QueueBlocked", "Deferred")
    assert dump(mine(2)) == {"is": "Deferred", "seconds": 2}
    assert load(dump(mine(2)), {"Deferred": mine}) == mine(2)


# --- what is not supported any more -----------------------------------------------------

GONE = Removed(
    accepts=lambda value: value == 1,
    what="max_repeat above 1",
    replacement=lambda value: {"repeats": value},
    last_reader="minfer 0.0.9",
)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans had a field that was replaced, and is only read with one value."""
    monkeypatch.setitem(wire_names.REMOVED, "Plan", {"max_repeat": GONE})


@pytest.mark.usefixtures("removed")
def test_a_removed_field_is_read_with_one_value_as_what_replaces_it() -> None:
    assert without_removed("Plan", {"max_repeat": 1, "step": 2}) == {
        "repeats": 1,
        "step": 2,
    }
    assert without_removed("Grow", {"max_repeat": 2}) == {"max_repeat": 2}


@pytest.mark.usefixtures("removed")
def test_a_journal_with_what_is_removed_is_refused_with_its_last_reader() -> None:
    settings, turns = recorded(8, 20)
    head, *rest = payloads(encode_journal(settings, turns[5:]), "run")
    parsed = json.loads(zlib.decompress(head[1:]))
    parsed["state"]["inflight"] = [{"is": "Plan", "max_repeat": 2}]
    changed = b"H" + zlib.compress(json.dumps(parsed).encode())
    with pytest.raises(JournalError) as caught:
        opened(MAGIC + b"".join(map(record, (changed, *rest))))
    assert str(caught.value) == (
        "run: journal of format 6 with max_repeat above 1: minfer 0.0.9 is the last that "
        "reads it"
    )


def test_an_unknown_field_is_refused() -> None:
    parsed = dump(EngineConfig(num_blocks=3))
    with pytest.raises(CodecError, match="unexpected keyword"):
        load({**parsed, "more": 1})
