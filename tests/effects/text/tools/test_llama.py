"""Answers in Llama 3's format: with its tag, and without."""

import pytest

from tests.effects.text.tools.cuts import found, in_one_piece

ADD = '{"name": "add", "parameters": {"a": "1;2", "b": [{}]}}'
NOW = '{"name": "now", "parameters": {}}'
OTHER = '{"name": "search.web", "parameters": {"q": "<|python_tag|>"}}'


@pytest.mark.parametrize(
    "text",
    [
        ADD,
        f"\n\n{ADD}\n",
        f"<|python_tag|>{ADD}",
        f"<|python_tag|> {ADD}",
    ],
)
def test_a_call(text: str) -> None:
    parsed = found(text, "llama3_json")
    assert parsed.parsed == [("add", {"a": "1;2", "b": [{}]})]
    assert parsed.content == ""


@pytest.mark.parametrize("between", ["; ", ";", "\n", ", ", "", "<|python_tag|>"])
def test_several(between: str) -> None:
    parsed = found(ADD + between + NOW, "llama3_json")
    assert [name for name, _ in parsed.calls] == ["add", "now"]
    assert parsed.content == ""


def test_the_tag_behind_text_and_a_name_that_was_not_offered() -> None:
    parsed = found(f"Let me see. <|python_tag|>{OTHER}", "llama3_json")
    assert parsed.content == "Let me see."
    assert parsed.parsed == [("search.web", {"q": "<|python_tag|>"})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "now"}',
        '{"colour": "red", "name": "add"}',
        '{"name": "add", "para',
        f"Call {ADD}",
        '[1, 2, {"name": "add"}]',
        "<|python_tag|>import os\nprint(1)",
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_t",
        "  {",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    parsed = found(text, "llama3_json")
    assert (parsed.content, parsed.calls) == (text, [])


def test_text_behind_a_call() -> None:
    parsed = found(f"{ADD} ; and more", "llama3_json")
    assert (parsed.content, len(parsed.calls)) == ("; and more", 1)


def test_an_answer_that_breaks_off() -> None:
    parsed = found(ADD[:-10], "llama3_json")
    assert (parsed.content, parsed.whole) == ("", [False])


def test_a_call_that_goes_wrong_stays_text_where_nothing_is_streamed() -> None:
    for tag in ("", "<|python_tag|>"):
        bad = tag + '{"name": "add", "parameters": {"a": oops}}'
        parsed = in_one_piece(bad, "llama3_json")
        assert (parsed.content, parsed.calls) == (bad, [])
