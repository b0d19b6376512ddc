"""Names in journals: none changes unnoticed, and renamed records keep theirs."""

import json
import zlib
from typing import Any

import attrs
import pytest

from minfer.config import EngineConfig
from minfer.messages import Held
from minfer.runs import wire_names
from minfer.runs.codec import RECORDS, CodecError, dump, load
from minfer.runs.decisions import chained, columns_of, compact, facts
from minfer.runs.journal import MAGIC, START, Head, JournalError
from minfer.runs.journal_reading import payloads
from minfer.runs.journal_writing import encode_journal, head_record
from minfer.runs.projection import state_digest
from minfer.runs.wire_names import LAST_READER, Removed, RemovedError, name_of
from minfer.state import Hold, Transition
from tests.core.recorded import recorded
from tests.core.runs.made import opened, record
from tests.core.runs.wire_names import FILE, found


def test_no_name_changes_unnoticed() -> None:
    """If this fails, a class or field was renamed, and its old name has to be added to
    `minfer.runs.wire_names`; or records or fields are new, or removed there: then write
    the file anew.
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
    """`Held`, were it renamed, and two of its fields."""
    names = {"cause": "blocked_by", "needs": "missing"}
    kind = renamed(Held, "Deferred", **names)
    monkeypatch.setitem(wire_names.CLASSES, "Held", kind)
    monkeypatch.setitem(wire_names.FIELDS, "Held", names)
    return kind


def test_facts_of_a_renamed_reason_are_the_same(deferred: Any) -> None:
    _, turns = recorded(8)
    turn = next(
        turn
        for turn in turns
        if any(isinstance(one, Held) for one in turn.transition.reasons)
    )
    was = turn.transition
    reasons: Any = [
        deferred(*attrs.astuple(one)) if isinstance(one, Held) else one
        for one in was.reasons
    ]
    now = Transition(was.state, was.commands, tuple(reasons))
    told, again = compact(facts(turn.before, was)), compact(facts(turn.before, now))
    assert b'"Held"' in told
    assert again == told
    assert chained(START, now, again) == chained(START, was, told)
    assert columns_of(deferred) == ("id", "sample", "cause", "needs", "available")


def test_a_snapshot_with_a_renamed_record_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(8)
    state = next(turn.before for turn in turns if turn.before.held)
    hold: Any = state.held
    told, digest = dump(state), state_digest(state)
    written = head_record(Head(config=config, turn=1, state=state))
    kind = renamed(Hold, "Deferral", place="position")
    kind.place = property(lambda self: self.position)  # for code that is as it was
    monkeypatch.setitem(wire_names.CLASSES, "Hold", kind)
    monkeypatch.setitem(wire_names.FIELDS, "Hold", {"place": "position"})
    now = attrs.evolve(state, held=kind(hold.place, hold.cause))
    assert json.dumps(dump(now)) == json.dumps(told)
    assert state_digest(now) == digest
    assert head_record(Head(config=config, turn=1, state=now)) == written
    assert load(told, {**RECORDS, "Hold": kind}) == now


def test_a_policy_of_a_program_keeps_its_own_name(deferred: Any) -> None:
    mine = attrs.make_class("Deferred", ["seconds"], frozen=True)
    assert (name_of(deferred), name_of(mine)) == ("Held", "Deferred")
    assert dump(mine(2)) == {"is": "Deferred", "seconds": 2}
    assert load(dump(mine(2)), {"Deferred": mine}) == mine(2)


# --- what is not supported any more -----------------------------------------------------


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that had a field each that is removed."""
    rounds = Removed(lambda value: value == 1, "several rounds")
    for name in ("EngineConfig", "EngineState", "Request"):
        monkeypatch.setitem(wire_names.REMOVED, name, {"rounds": rounds})


@pytest.mark.usefixtures("gone")
def test_a_removed_field_is_read_with_what_is_accepted() -> None:
    told = dump(EngineConfig(num_blocks=3))
    assert load({**told, "rounds": 1}) == EngineConfig(num_blocks=3)
    with pytest.raises(RemovedError, match="several rounds"):
        load({**told, "rounds": {"is": "RecordThatIsGone"}})
    with pytest.raises(CodecError, match="unexpected keyword"):
        load({**told, "more": 1})


def with_rounds(part: str, rounds: int) -> bytes:
    """A journal of format 3 in which records of a `part` have a field more."""
    config, turns = recorded(8, 20)
    head, *rest = payloads(encode_journal(config, turns[5:]), "run")
    told = json.loads(zlib.decompress(head[1:]))
    told["format"] = 3
    if part != "request":
        told[part]["rounds"] = rounds
    else:
        more = b'"is":"Submit","request":{"rounds":%d,' % rounds
        rest = [one.replace(b'"is":"Submit","request":{', more) for one in rest]
    changed = b"H" + zlib.compress(json.dumps(told).encode())
    return MAGIC + b"".join(map(record, (changed, *rest)))


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("part", ["config", "state", "request"])
def test_a_journal_with_what_is_removed_is_refused_with_its_last_reader(
    part: str,
) -> None:
    assert [*opened(with_rounds(part, 1)).turns()] == recorded(8, 20)[1][5:]
    with pytest.raises(JournalError) as caught:
        [*opened(with_rounds(part, 2)).turns()]
    where = "run: turn " if part == "request" else "run: journal"
    assert str(caught.value).startswith(where)
    assert str(caught.value).endswith(
        f"journal of format 3 with several rounds: {LAST_READER} is the last that reads "
        f"it"
    )
