"""Calls as JSON objects: order, spelling, and what is held until all is known."""

import pytest

from minfer.effects.text.tools.deltas import Arguments, CallStart, ContentDelta
from tests.effects.text.tools.cuts import found, parser


def call(inside: str) -> tuple[str, list[tuple[str, str]]]:
    one = found(f"<tool_call>{{{inside}}}</tool_call>", "hermes")
    return one.content, one.calls


@pytest.mark.parametrize(
    "inside",
    [
        '"name": "add", "arguments": {"a": 1}',
        '"name": "add", "parameters": {"a": 1}',
        '"arguments": {"a": 1}, "name": "add"',
        '"type": "function", "name": "add", "arguments": {"a": 1}, "id": "7"',
        '"name": "add", "arguments": "{\\"a\\": 1}"',
        '"name":"add","arguments":" {\\"a\\": 1} "',
        '"name": "\\u0061dd", "arguments": {"a": 1}',
    ],
)
def test_one_call_in_many_spellings(inside: str) -> None:
    assert call(inside) == ("", [("add", '{"a": 1}')])


def test_a_field_after_the_arguments_is_text() -> None:
    odd = '"why": [true, {"b": "}"}]'
    inside = f'"name": "add", "arguments": {{"a": 1}}, {odd}'
    assert call(inside) == (odd, [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    "inside",
    [
        '"name": "add", "name": "now", "arguments": {}',
        '"arguments": {}, "parameters": {"a": 1}, "name": "add"',
    ],
)
def test_two_names_or_arguments_make_no_call(inside: str) -> None:
    assert call(inside) == (f"<tool_call>{{{inside}}}</tool_call>", [])


@pytest.mark.parametrize("inside", ['"name": "now"', '"name": "now", "arguments": null'])
def test_a_call_without_arguments(inside: str) -> None:
    assert call(inside) == ("", [("now", "{}")])


@pytest.mark.parametrize("arguments", ['"x"', '"[1]"', '"{} {}"', '"{"', "nul", "true"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    inside = f'"name": "add", "arguments": {arguments}'
    assert call(inside) == (f"<tool_call>{{{inside}}}</tool_call>", [])


def test_line_breaks_within_strings_become_escapes() -> None:
    _, calls = call('"name": "add", "arguments": {"a": "x\ny\t\\n"\n}')
    assert calls == [("add", '{"a": "x\\ny\\t\\n"\n}')]
    _, calls = call('"arguments": "{\\"a\\": \\"x\\ny\\"}", "name": "add"')
    assert calls == [("add", '{"a": "x\\ny"}')]


def test_arguments_go_out_as_they_come() -> None:
    one = parser("hermes")
    assert one.push('Hm.<tool_call>{"name": "add", "arguments": ') == [
        ContentDelta("Hm.")
    ]
    start, first = one.push('{"a')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, first) == (0, "add", Arguments(0, '{"a'))
    assert one.push('": "b') == [Arguments(0, '": "b')]
    assert one.push("c") == [Arguments(0, "c")]


def test_arguments_before_the_name_are_held() -> None:
    one = parser("hermes")
    assert one.push('<tool_call>{"arguments": {"a": 1}, "name": "ad') == []
    assert one.push('d"')[1:2] == [Arguments(0, '{"a": 1}')]


def test_nothing_that_may_be_a_marker_goes_out() -> None:
    one = parser("hermes")
    assert one.push("a <tool_cal") == [ContentDelta("a")]
    assert one.push("m <") == [ContentDelta(" <tool_calm")]
    assert one.push("", final=True) == [ContentDelta(" <")]
