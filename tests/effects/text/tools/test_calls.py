"""Calls as JSON objects: order, spelling, and what is held until all is known."""

import pytest

from minfer.effects.text.tools.deltas import Arguments, CallStart, ContentDelta
from tests.effects.text.tools.cuts import found, parser


def call(fields: str) -> tuple[str, list[tuple[str, str]]]:
    parsed = found(f"<tool_call>{{{fields}}}</tool_call>", "hermes")
    return parsed.content, parsed.calls


@pytest.mark.parametrize(
    "fields",
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
def test_one_call_in_many_spellings(fields: str) -> None:
    assert call(fields) == ("", [("add", '{"a": 1}')])


def test_a_field_after_the_arguments_is_text() -> None:
    odd = '"why": [true, {"b": "}"}]'
    fields = f'"name": "add", "arguments": {{"a": 1}}, {odd}'
    assert call(fields) == (odd, [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    "fields",
    [
        '"name": "add", "name": "now", "arguments": {}',
        '"arguments": {}, "parameters": {"a": 1}, "name": "add"',
    ],
)
def test_two_names_or_arguments_make_no_call(fields: str) -> None:
    assert call(fields) == (f"<tool_call>{{{fields}}}</tool_call>", [])


@pytest.mark.parametrize("fields", ['"name": "now"', '"name": "now", "arguments": null'])
def test_a_call_without_arguments(fields: str) -> None:
    assert call(fields) == ("", [("now", "{}")])


@pytest.mark.parametrize("arguments", ['"x"', '"[1]"', '"{} {}"', '"{"', "nul", "true"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    fields = f'"name": "add", "arguments": {arguments}'
    assert call(fields) == (f"<tool_call>{{{fields}}}</tool_call>", [])


def test_line_breaks_within_strings_become_escapes() -> None:
    _, calls = call('"name": "add", "arguments": {"a": "x\ny\t\\n"\n}')
    assert calls == [("add", '{"a": "x\\ny\\t\\n"\n}')]
    _, calls = call('"arguments": "{\\"a\\": \\"x\\ny\\"}", "name": "add"')
    assert calls == [("add", '{"a": "x\\ny"}')]


def test_arguments_go_out_as_they_come() -> None:
    hermes = parser("hermes")
    assert hermes.push('Hm.<tool_call>{"name": "add", "arguments": ') == [
        ContentDelta("Hm.")
    ]
    start, first = hermes.push('{"a')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, first) == (0, "add", Arguments(0, '{"a'))
    assert hermes.push('": "b') == [Arguments(0, '": "b')]
    assert hermes.push("c") == [Arguments(0, "c")]


def test_arguments_before_the_name_are_held() -> None:
    hermes = parser("hermes")
    assert hermes.push('<tool_call>{"arguments": {"a": 1}, "name": "ad') == []
    assert hermes.push('d"')[1:2] == [Arguments(0, '{"a": 1}')]


def test_nothing_that_may_be_a_marker_goes_out() -> None:
    hermes = parser("hermes")
    assert hermes.push("a <tool_cal") == [ContentDelta("a")]
    assert hermes.push("m <") == [ContentDelta(" <tool_calm")]
    assert hermes.push("", final=True) == [ContentDelta(" <")]
