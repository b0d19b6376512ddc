"""Choices of an answer, each with a parser of its own."""

from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.answer_parsing import (
    AnswerParser,
    ParsedAnswer,
    ParsedCall,
    check_template,
    parsing_of,
)
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tools.deltas import ContentDelta
from minfer.effects.text.tools.formats import NONE, Parsers, Parsing

CALLS = "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'
    for name in ("f", "g")
)


def parsed(parsing: Parsing | None) -> AnswerParser:
    request: Any = SimpleNamespace(parsing=parsing, stream=True)
    return AnswerParser(request)


def output(text: str, end: str | None = None) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=[], finish_reason=end)


def test_nothing_is_looked_for() -> None:
    answer_parser = parsed(None)
    assert answer_parser.read(0, output(f" {CALLS}")) == [ContentDelta(f" {CALLS}")]
    assert answer_parser.read(0, output("", "stop")) == []
    assert not answer_parser.calls(0)


def test_choices_are_parsed_separately() -> None:
    answer_parser = parsed(Parsing(tools="hermes", names=("f",)))
    assert answer_parser.read(0, output("a <tool")) == [ContentDelta("a")]
    assert answer_parser.read(1, output("b")) == [ContentDelta("b")]
    first = ParsedAnswer.of(
        answer_parser.read(0, output(CALLS.removeprefix("<tool"), "stop"))
    )
    assert [(call.name, call.arguments) for call in first.calls] == [
        ("f", '{"a": 1}'),
        ("g", '{"a": 1}'),
    ]
    assert answer_parser.calls(0)
    assert not answer_parser.calls(1)
    assert answer_parser.read(1, output(" ", "stop")) == [ContentDelta(" ")]


def test_only_the_first_call_counts_if_they_are_not_parallel() -> None:
    answer_parser = parsed(Parsing(tools="hermes", names=("f",), parallel=False))
    answer = ParsedAnswer.of(answer_parser.read(0, output(f"{CALLS}x", "stop")))
    assert [call.name for call in answer.calls] == ["f"]
    assert answer.content == "x"


def test_deltas_put_together() -> None:
    answer_parser = parsed(Parsing(tools="hermes", reasoning="think", names=("f",)))
    answer = ParsedAnswer.of(
        answer_parser.read(0, output(f"<think>a</think>b{CALLS}", "stop"))
    )
    calls = [
        ParsedCall(call.id, name, '{"a": 1}')
        for call, name in zip(answer.calls, "fg", strict=True)
    ]
    assert answer == ParsedAnswer("b", "a", calls)


def test_how_an_answer_is_read() -> None:
    ends: list[list[int]] = []

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        ends.append(ids)
        return "<think>\n"

    tokenizer = SimpleNamespace(decode=decode)

    def parsing_for(parsers: Parsers) -> Parsing | None:
        llm: Any = SimpleNamespace(tokenizer=tokenizer, parsers=parsers)
        return parsing_of(llm, [7] * 10_000, {"f": None}, parallel=False)

    assert parsing_for(Parsers(NONE, NONE)) is None
    assert parsing_for(Parsers("hermes", NONE)) == Parsing(
        tools="hermes", names=("f",), parallel=False
    )
    assert ends == []
    parsing = parsing_for(Parsers(NONE, "think"))
    assert parsing is not None
    assert parsing.opened
    assert len(ends[0]) < 100


def test_a_model_without_tools() -> None:
    check_template(Parsers("hermes", "none"), "tools")
    check_template(Parsers("none", "none"), "tools")  # as the user chose
    with pytest.raises(ApiError, match="tools: this model's chat template shows no way"):
        check_template(Parsers("unknown", "none"), "tools")
