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
    parsing = Parsers(FORM, "none").parsing({"f": SCHEMA, "g": None}, "")
    assert parsing is not None
    return parsing


def read(text: str) -> Found:
    chosen = parsing()
    first = fed(chosen.parser(), [text])
    for pieces in cuts(text, 4):
        assert fed(chosen.parser(), pieces) == first, pieces
    return reported(first)


@pytest.mark.long
def test_calls_and_text_around_them() -> None:
    parsed = read(f"I look.\n{answer(FORM, [('f', ARGUMENTS), ('g', {})])}\nDone.")
    assert parsed.parsed == [("f", ARGUMENTS), ("g", {})]
    assert parsed.content == "I look.\n\nDone."
    assert parsed.whole == [True, True]


def test_types_of_what_is_in_objects_and_lists() -> None:
    paths = {path for _, path in typed_paths({"f": SCHEMA, "g": None})}
    assert paths == {"days", "sure", "none", "where", "where/at", "where/at/item"}


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
    parsed = read(text)
    assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.long
def test_answers_that_break_off() -> None:
    chosen = parsing()
    for end in range(0, len(CALL), 3):
        streamed = reported(fed(chosen.parser(), [CALL[:end]]))
        assert (True in streamed.whole) is (f"{MARK}</invoke>" in CALL[:end])
        once = reported(fed(chosen.parser(streaming=False), [CALL[:end]]))
        assert once.calls or once.content == CALL[:end]


def test_a_good_call_behind_a_bad_one() -> None:
    bad = f'{MARK}<tool_call>{MARK}<invoke name="f">{MARK}<days>3{MARK}</days>oops'
    parsed = read(bad + answer(FORM, [("g", {})]))
    assert [name for name, _ in parsed.calls] == ["f", "g"]
    assert (parsed.whole, parsed.content) == ([False, True], "oops")
