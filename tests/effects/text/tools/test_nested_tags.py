"""Answers of MiniMax M3: lists and objects are tags in tags."""

from typing import Any, Final

import pytest

from minfer.effects.text.tools.formats import Parsers, Parsing
from minfer.effects.text.tools.offered import typed_paths
from tests.effects.text.tools.cuts import Found, cuts, fed, reported
from tests.effects.text.tools.samples import answer

FORM: Final = "minimax_m3"
MARK: Final = "]<]minimax[>["
ARGUMENTS: Final[dict[str, Any]] = {
    "city": ' Zürich <b>\n"x" ]<] ',
    "digits": "5",
    "days": 3,
    "sure": False,
    "where": {"at": [1, 2], "name": "7", "in": {"deep": [{"x": "y"}]}},
    "none": None,
}
SCHEMA: Final[dict[str, Any]] = {
    "properties": {
        "city": {"type": "string"},
        "digits": {"type": "string"},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
        "none": {"type": "null"},
        "where": {"$ref": "#/$defs/where"},
    },
    "$defs": {
        "where": {
            "type": "object",
            "properties": {
                "at": {"type": "array", "items": {"type": "integer"}},
                "name": {"type": "string"},
            },
        }
    },
}
CALL: Final = answer(FORM, [("f", ARGUMENTS)])


def parsing() -> Parsing:
    made = Parsers(FORM, "none").parsing({"f": SCHEMA, "g": None}, "")
    assert made is not None
    return made


def read(text: str) -> Found:
    how = parsing()
    first = fed(how.parser(), [text])
    for pieces in cuts(text, 4):
        assert fed(how.parser(), pieces) == first, pieces
    return reported(first)


@pytest.mark.long
def test_calls_and_text_around_them() -> None:
    got = read(f"I look.\n{answer(FORM, [('f', ARGUMENTS), ('g', {})])}\nDone.")
    assert got.parsed == [("f", ARGUMENTS), ("g", {})]
    assert got.content == "I look.\n\nDone."
    assert got.whole == [True, True]


def test_types_of_what_is_in_objects_and_lists() -> None:
    found = {path for _, path in typed_paths({"f": SCHEMA, "g": None})}
    assert found == {"days", "sure", "none", "where", "where/at", "where/at/item"}


@pytest.mark.parametrize(
    "text",
    [
        f"{MARK}<tool_call>",
        f"{MARK}<tool_call>none",
        f'{MARK}<tool_call>{MARK}<invoke name="">{MARK}</invoke>',
        f'{MARK}<tool_call>{MARK}<invoke name="f" x>{MARK}</invoke>',
        "<tool_call>]<]minimax",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    got = read(text)
    assert (got.content, got.calls) == (text, [])


@pytest.mark.long
def test_answers_that_break_off() -> None:
    how = parsing()
    for end in range(0, len(CALL), 3):
        streamed = reported(fed(how.parser(), [CALL[:end]]))
        assert (True in streamed.whole) is (f"{MARK}</invoke>" in CALL[:end])
        once = reported(fed(how.parser(streaming=False), [CALL[:end]]))
        assert once.calls or once.content == CALL[:end]


def test_a_good_call_behind_a_bad_one() -> None:
    bad = f'{MARK}<tool_call>{MARK}<invoke name="f">{MARK}<days>3{MARK}</days>oops'
    got = read(bad + answer(FORM, [("g", {})]))
    assert [name for name, _ in got.calls] == ["f", "g"]
    assert (got.whole, got.content) == ([False, True], "oops")
