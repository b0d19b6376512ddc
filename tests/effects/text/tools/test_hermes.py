"""Answers in Hermes' format, as Qwen's models write them."""

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": {"c": null}}}'


def marked(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{call_json}\n</tool_call>" for call_json in objects)


def test_two_objects_between_two_markers() -> None:
    parsed = found(f"<tool_call>\n{WEATHER}\n{ADD}</tool_call>", "hermes")
    assert [name for name, _ in parsed.calls] == ["get_weather", "add"]
    assert parsed.content == ""


def test_a_list_between_two_markers() -> None:
    parsed = found(f"<tool_call>[{WEATHER}, {ADD}]</tool_call>", "hermes")
    assert [name for name, _ in parsed.calls] == ["get_weather", "add"]
    assert parsed.content == ""


@pytest.mark.parametrize("marker", ["</tool_call>", "<tool_call>", '\\"}}', "{[", "🙂é"])
def test_strings_that_look_like_markers(marker: str) -> None:
    text = f'{{"name": "add", "arguments": {{"a": "{marker}"}}}}'
    parsed = found(marked(text, WEATHER), "hermes")
    assert parsed.parsed[0] == ("add", {"a": marker.replace('\\"', '"')})
    assert len(parsed.calls) == 2
    assert parsed.content == ""


def test_white_space_that_is_not_layout_stays() -> None:
    assert found(" \n a  b \n\n", "hermes").content == " \n a  b \n\n"
    broken = " a \n <tool_call>\n [ ] \n"
    assert found(broken, "hermes").content == broken


@pytest.mark.parametrize(
    "text",
    [
        "1 < 2, <tool, <tool_cal",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>none</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "colour": 5}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "na',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        '<tool_call>{"name" "add"}</tool_call>',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    parsed = found(text, "hermes")
    assert (parsed.content, parsed.calls) == (text, [])


def test_a_good_call_behind_a_bad_one() -> None:
    parsed = found(f"<tool_call>no{marked(ADD)}", "hermes")
    assert (parsed.content, len(parsed.calls)) == ("<tool_call>no", 1)


@pytest.mark.parametrize("cut", [len('{"name": "add", "arguments": {'), len(ADD) - 3])
def test_an_answer_that_breaks_off_within_arguments(cut: int) -> None:
    parsed = found("<tool_call>" + ADD[:cut], "hermes")
    assert (parsed.whole, parsed.content) == ([False], "")
    assert ADD[:cut].endswith(parsed.calls[0][1])


def test_a_marker_that_was_left_out_at_the_end() -> None:
    parsed = found("<tool_call>" + ADD, "hermes")
    assert (parsed.whole, parsed.content) == ([True], "")


def test_arguments_that_go_wrong() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    parsed = found(text, "hermes")
    assert (parsed.calls, parsed.whole) == ([("add", '{"a": ')], [False])
    assert parsed.content == "oops}}"


@pytest.mark.parametrize(
    "bad",
    [
        """<tool_call>
{"name": "get_weather", "arguments": {"city": "Berlin", "cost": celsius}}
</tool_call>""",
        '<tool_call>{"name": "add", "arguments": {"a": [1, 2}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "1',
        '<tool_call> {"name": "add", "arguments": {',
    ],
)
def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed(bad: str) -> None:
    parsed = in_one_piece(bad, "hermes")
    assert (parsed.content, parsed.calls) == (bad, [])
    parsed = in_one_piece(f"Hm.\n{marked(ADD)}\nSo: {bad}", "hermes")
    assert (parsed.content, len(parsed.calls)) == (f"Hm.\n\nSo: {bad}", 1)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["}", "]", "\n}\n", "}}]", " ] }"])
@pytest.mark.parametrize("body", [ADD, ADD[:-1], f"[{ADD}", f"[{ADD}]", f"{ADD}\n{ADD}"])
def test_brackets_too_many_and_too_few_are_no_content(body: str, wrong: str) -> None:
    for arguments in (body, body + wrong):
        text = f"I add.\n<tool_call>\n{arguments}\n</tool_call>\nDone: 1."
        parsed = found(text, "hermes")
        assert parsed.content == "I add.\n\nDone: 1."
        assert {*parsed.calls} == {("add", '{"a": 1, "b": {"c": null}}')}
        assert all(parsed.whole)
        assert in_one_piece(text, "hermes") == parsed
        two = found(f"<tool_call>{arguments}<tool_call>{ADD}</tool_call>", "hermes")
        assert (two.content, len(two.calls)) == ("", len(parsed.calls) + 1)


def test_what_comes_behind_arguments_and_should_not() -> None:
    parsed = found('<tool_call>{"name": "add", "arguments": {}} yes', "hermes")
    assert (parsed.calls, parsed.content) == ([("add", "{}")], "yes")
    parsed = found('<tool_call>{"name": "add", "arguments": {} yes', "hermes")
    assert (parsed.calls, parsed.content) == ([("add", "{}")], "yes")
