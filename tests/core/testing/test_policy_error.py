"""The stories of policy errors: short, and in the names of Python's classes."""

from typing import Any

import attrs
import pytest

from minfer.journal import wire_names
from minfer.records import messages
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Cancel, PolicyOverride, QueueBlocked, Submit
from minfer.records.request import Request
from minfer.records.state import Transition, Turn, initial
from minfer.testing.policy_error import MAX_LINES, PolicyError, record_line, story

CONFIG = EngineConfig(num_blocks=4, max_model_len=16, vocab_size=9)
STATE = initial(CONFIG)


def turn(number: int, events: Any = (), reasons: Any = ()) -> Turn:
    return Turn(number, STATE, tuple(events), Transition(STATE, (), tuple(reasons)))


def request(name: str, **fields: Any) -> Submit:
    return Submit(Request(id=name, prompt=(1, 2), max_tokens=3, **fields))


def test_records_have_the_names_of_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where journals have another name for them, from before they were renamed."""
    old_names: dict[str, type] = {"Held": QueueBlocked, "Overruled": PolicyOverride}
    monkeypatch.setattr(wire_names, "CLASSES", old_names)
    blocked = QueueBlocked("r0", 0, "rows")
    assert record_line(blocked) == "QueueBlocked id=r0 sample=0 cause=rows"
    override = PolicyOverride("rank", "returned NaN")
    assert record_line(override) == "PolicyOverride question=rank why=returned NaN"
    lines = story([turn(3, [request("r0")], [blocked, override])])
    assert [line.split("s: ")[1].split()[0] for line in lines] == [
        "Request",
        "QueueBlocked",
        "PolicyOverride",
    ]


def test_every_reason_has_a_line() -> None:
    for name in ("Admitted", "Preempted", "Ended"):
        kind = getattr(messages, name)
        values = {field.name: "r7" for field in attrs.fields(kind) if field.init}
        assert record_line(kind(**values)).startswith(f"{name} id=r7")


def test_reports_that_differ_in_their_ids_alone_are_one_line() -> None:
    events = [request(f"r{number}") for number in range(9)]
    (line,) = story([turn(0, events)])
    assert line.endswith("Request id=r0 to r8 (9 alike) prompt=(1, 2) max_tokens=3")
    events[4] = request("r4", priority=2)
    assert len(story([turn(0, events)])) == 3


def test_turns_that_differ_in_numbers_alone_are_told_once() -> None:
    turns = [
        turn(number, [request(f"r{number}")], [Admitted(f"r{number}", 0, 0.5, 0, 2)])
        for number in range(30)
    ]
    lines = story(turns)
    assert lines[0].startswith("  30 turns alike, until turn 29, ")
    assert len(lines) == 3
    assert len(story(turns[:2])) == 4


def test_a_long_story_loses_its_middle() -> None:
    turns = [
        turn(n, [request(f"r{n}", client="abcdefgh"[n % 8] * (n + 1))]) for n in range(90)
    ]
    lines = story(turns)
    assert len(lines) == MAX_LINES
    assert "turn 0," in lines[0]
    assert "turn 89," in lines[-1]
    assert any("55 lines left out" in line for line in lines)
    error = PolicyError("order", "order: why", CONFIG, turns, "victim")
    text = str(error).split("\n")
    assert text[:2] == ["order: why", "method at fault: victim"]
    assert len(text) <= 40


def test_an_error_may_have_no_story() -> None:
    error = PolicyError("never ends", "it did not return", None, (), "rank")
    assert str(error) == "never ends: it did not return\nmethod at fault: rank"
    assert error.of_method("budget").method == "budget"


def test_cancels_are_told() -> None:
    (line,) = story([turn(2, [Cancel("r1")])])
    assert line == "  turn 2, 0.0000 s: Cancel id=r1"
