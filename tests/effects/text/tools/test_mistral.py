"""Answers in Mistral's formats, older and newer."""

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

WHOLE = [("add", {"a": "[ARGS]", "b": 2}), ("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "[ARGS]", "b": 2}}, '
            '{"name": "now", "arguments": {}}]'
        ),
        (
            '[TOOL_CALLS][{"arguments": {"a": "[ARGS]", "b": 2}, "name": "add"},\n'
            '{"name": "now", "arguments": {}}]\n'
        ),
        '[TOOL_CALLS]add[ARGS]{"a": "[ARGS]", "b": 2}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]add{"a": "[ARGS]", "b": 2}[TOOL_CALLS]now{}',
        (
            '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS] {"a": "[ARGS]", "b": 2} '
            "[TOOL_CALLS]now[CALL_ID]000000001[ARGS]{}"
        ),
    ],
)
def test_calls(text: str) -> None:
    parsed = found(text, "mistral")
    assert parsed.parsed == WHOLE
    assert parsed.content == ""


def test_text_before_calls() -> None:
    parsed = found('Sure [1].\n[TOOL_CALLS]add[ARGS]{"a": 1}', "mistral")
    assert (parsed.content, parsed.parsed) == ("Sure [1].", [("add", {"a": 1})])


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALL] [TOOL_CALLS",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS]add[ARGS]",
        "[TOOL_CALLS]add[ARGS]5",
        "[TOOL_CALLS]add of it",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]add[ARGS][ARGS]{}",  # as for mistral-common, which raises an error
        "[TOOL_CALLS]:[ARGS]{}",
        '[TOOL_CALLS] [{"name": "add", "arguments": 5}]',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    parsed = found(text, "mistral")
    assert (parsed.content, parsed.calls) == (text, [])


def test_an_answer_that_breaks_off() -> None:
    parsed = found('[TOOL_CALLS] [{"name": "add", "arguments": {"a": "x', "mistral")
    assert (parsed.calls, parsed.whole) == ([("add", '{"a": "x')], [False])
    parsed = found('[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"na', "mistral")
    assert (parsed.calls, parsed.content) == ([("add", "{}")], ', {"na')


@pytest.mark.parametrize(
    "bad",
    [
        '[TOOL_CALLS]add[ARGS]{"a": oops}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1',
    ],
)
def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed(bad: str) -> None:
    parsed = in_one_piece(f"[TOOL_CALLS]add[ARGS]{{}}{bad}", "mistral")
    assert (parsed.content, parsed.calls) == (bad, [("add", "{}")])


@pytest.mark.parametrize("odd", ["]", "}]", "\n]]"])
@pytest.mark.parametrize(
    "call",
    [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}',
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
    ],
)
def test_brackets_too_many_and_too_few_are_no_content(call: str, odd: str) -> None:
    parsed = found(f"{call}{odd}Done. [1]{call}", "mistral")
    assert parsed.parsed == [("add", {"a": 1})] * 2
    assert parsed.content == "Done. [1]"
