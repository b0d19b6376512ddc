"""Answers in Hermes' format, as Qwen's models write them."""

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": {"c": null}}}'


def marked(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def test_a_call() -> None:
    one = found(marked(WEATHER), "hermes")
    assert one.calls == [("get_weather", '{"city": "Zürich", "days": [1, 2]}')]
    assert (one.content, one.reasoning, one.whole) == ("", "", [True])


def test_several_calls_and_text_around_them() -> None:
    text = f"Let me look.\n\n{marked(WEATHER, ADD)}\nThat is all.\n"
    one = found(text, "hermes")
    assert [name for name, _ in one.calls] == ["get_weather", "add"]
    assert one.parsed[1][1] == {"a": 1, "b": {"c": None}}
    assert one.content == "Let me look.\n\nThat is all.\n"


def test_two_objects_between_two_markers() -> None:
    one = found(f"<tool_call>\n{WEATHER}\n{ADD}</tool_call>", "hermes")
    assert [name for name, _ in one.calls] == ["get_weather", "add"]
    assert one.content == ""


def test_a_list_between_two_markers() -> None:
    one = found(f"<tool_call>[{WEATHER}, {ADD}]</tool_call>", "hermes")
    assert [name for name, _ in one.calls] == ["get_weather", "add"]
    assert one.content == ""


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", '\\"}}', "{[", "🙂é"])
def test_strings_that_look_like_markers(inside: str) -> None:
    text = f'{{"name": "add", "arguments": {{"a": "{inside}"}}}}'
    one = found(marked(text, WEATHER), "hermes")
    assert one.parsed[0] == ("add", {"a": inside.replace('\\"', '"')})
    assert len(one.calls) == 2
    assert one.content == ""


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
    one = found(text, "hermes")
    assert (one.content, one.calls) == (text, [])


def test_a_good_call_behind_a_bad_one() -> None:
    one = found(f"<tool_call>no{marked(ADD)}", "hermes")
    assert (one.content, len(one.calls)) == ("<tool_call>no", 1)


@pytest.mark.parametrize("at", [len('{"name": "add", "arguments": {'), len(ADD) - 3])
def test_an_answer_that_breaks_off_within_arguments(at: int) -> None:
    one = found("<tool_call>" + ADD[:at], "hermes")
    assert (one.whole, one.content) == ([False], "")
    assert ADD[:at].endswith(one.calls[0][1])


def test_a_marker_that_was_left_out_at_the_end() -> None:
    one = found("<tool_call>" + ADD, "hermes")
    assert (one.whole, one.content) == ([True], "")


def test_arguments_that_go_wrong() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    one = found(text, "hermes")
    assert (one.calls, one.whole) == ([("add", '{"a": ')], [False])
    assert one.content == "oops}}"


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
    one = in_one_piece(bad, "hermes")
    assert (one.content, one.calls) == (bad, [])
    one = in_one_piece(f"Hm.\n{marked(ADD)}\nSo: {bad}", "hermes")
    assert (one.content, len(one.calls)) == (f"Hm.\n\nSo: {bad}", 1)


def test_calls_are_the_same_where_nothing_is_streamed() -> None:
    text = f"Let me look.\n\n{marked(WEATHER, ADD)}\nThat is all.\n"
    assert in_one_piece(text, "hermes") == found(text, "hermes")


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["}", "]", "\n}\n", "}}]", " ] }"])
@pytest.mark.parametrize("body", [ADD, ADD[:-1], f"[{ADD}", f"[{ADD}]", f"{ADD}\n{ADD}"])
def test_brackets_too_many_and_too_few_are_no_content(body: str, wrong: str) -> None:
    for inside in (body, body + wrong):
        text = f"I add.\n<tool_call>\n{inside}\n</tool_call>\nDone: 1."
        one = found(text, "hermes")
        assert one.content == "I add.\n\nDone: 1."
        assert {*one.calls} == {("add", '{"a": 1, "b": {"c": null}}')}
        assert all(one.whole)
        assert in_one_piece(text, "hermes") == one
        both = found(f"<tool_call>{inside}<tool_call>{ADD}</tool_call>", "hermes")
        assert (both.content, len(both.calls)) == ("", len(one.calls) + 1)


def test_what_comes_behind_arguments_and_should_not() -> None:
    one = found('<tool_call>{"name": "add", "arguments": {}} yes', "hermes")
    assert (one.calls, one.content) == ([("add", "{}")], "yes")
    one = found('<tool_call>{"name": "add", "arguments": {} yes', "hermes")
    assert (one.calls, one.content) == ([("add", "{}")], "yes")
