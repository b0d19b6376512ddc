"""Answers of checkpoints with a response_template, beside transformers' own parser."""

import json
import logging
import time
from pathlib import Path
from typing import Any, Final

import pytest
from transformers.utils.chat_parsing import parse_response

from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import NONE, UNKNOWN, Parsers, Parsing
from minfer.effects.text.tools.response_template import RESPONSE, answer_prefix
from tests.effects.scripted import write_talker
from tests.effects.text.tools.cuts import Found, cuts, fed, reported

HERMES: Final[dict[str, Any]] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["<|im_end|>"]},
    },
}
GEMMA: Final[dict[str, Any]] = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {
                "unquoted_keys": True,
                "string_delims": [['<|"|>', '<|"|>']],
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>"]},
    },
}
PYTHON: Final[dict[str, Any]] = {
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|end|>",
            "content": "python-call-list",
            "transform": {
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": {},
    },
}
CALL: Final = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
GEMMA_CALL: Final = '<|tool_call>call:f{a:<|"|>x, y<|"|>,b:[1,{c:true}]}<tool_call|>'
TYPED: Final = {"f": {"properties": {"a": {"type": "integer"}}}}


def parsing(template: dict[str, Any], tools: Any = None, prompt: str = "") -> Parsing:
    chosen = Parsers(RESPONSE, NONE, json.dumps(template)).parsing(tools or {}, prompt)
    assert chosen is not None
    return chosen


def read(parsing: Parsing, text: str) -> Found:
    first = fed(parsing.parser(), [text])
    for pieces in cuts(text, 4):
        assert fed(parsing.parser(), pieces) == first, pieces
    assert fed(parsing.parser(streaming=False), [text]) == first
    return reported(first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, "Hi."),
        (HERMES, f"<think>Hm.</think>I look.{CALL}\n{CALL}"),
        (HERMES, f"{CALL}<|im_end|>"),
        (GEMMA, GEMMA_CALL * 2),
        (GEMMA, f"<|channel>thought\nHm.<channel|>Hi.{GEMMA_CALL}"),
        (PYTHON, "<|call|>[f(a=1, b='x'), g()]<|end|>"),
    ],
)
def test_answers_are_what_transformers_makes_of_them(
    template: dict[str, Any], text: str
) -> None:
    parsed = read(parsing(template, {"f": None}), text)
    expected = parse_response(text, template, prefix="")
    calls = [call["function"] for call in expected.get("tool_calls", [])]
    assert parsed.parsed == [(call["name"], call["arguments"]) for call in calls]
    assert parsed.content.strip() == expected.get("content", "")
    assert parsed.reasoning.strip() == expected.get("thinking", "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a </tool_call> b", ["a </tool_call> b"]),
        ("</tool_call>", ["</tool_call>"]),
        ("<tool_call>", ["<tool_call>"]),
    ],
)
def test_a_closing_marker_within_a_value(text: str, values: list[str]) -> None:
    call = json.dumps({"name": "f", "arguments": {"a": text}})
    parsed = read(parsing(HERMES), f"w1<tool_call>{call}</tool_call>w2")
    assert [args["a"] for _, args in parsed.parsed] == values
    assert parsed.content == "w1\n\nw2"


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        CALL[:-20],
        "<tool_call>no</tool_call>",
        "So: <tool_call> is a marker.",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call> x',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call>" * 3,
        "1 < 2 <tool_c",
    ],
)
def test_what_is_no_call_stays_text_as_it_was_written(text: str) -> None:
    parsed = read(parsing(HERMES), text)
    assert (parsed.content, parsed.calls) == (text, [])


def test_calls_within_reasoning_do_not_count() -> None:
    parsed = read(parsing(HERMES), f"<think>{CALL}</think>Hi.")
    assert (parsed.calls, parsed.content, parsed.reasoning) == ([], "Hi.", CALL)


def test_reasoning_that_the_prompt_has_begun() -> None:
    chosen = parsing(HERMES, prompt="<|im_start|>assistant\n<think>")
    parsed = read(chosen, "Hm.</think>Hi.")
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Hi.")


def test_texts_are_what_the_schema_requires() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "5", "b": "5"}}</tool_call>'
    assert read(parsing(HERMES, TYPED), call).parsed == [("f", {"a": 5, "b": "5"})]


def test_special_tokens_of_the_template_are_seen() -> None:
    assert {"<|im_end|>", "<tool_call>", "</think>"} <= set(parsing(HERMES).markers)
    assert {'<|"|>', "<|tool_call>", "<turn|>"} <= set(parsing(GEMMA).markers)


def described(tmp_path: Path, template: object) -> Tokenizer:
    write_talker(tmp_path, "{{ tools }}<tool_call>")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "response_template": template}))
    return Tokenizer(tmp_path)


def test_a_checkpoints_own_template_comes_before_the_table(tmp_path: Path) -> None:
    parsers = Parsers().resolve_for(described(tmp_path, HERMES))
    assert (parsers.tools, parsers.written) == (RESPONSE, "hermes")
    assert json.loads(parsers.response) == HERMES
    named = {"default": GEMMA, "other": HERMES}
    parsers = Parsers().resolve_for(described(tmp_path, named))
    assert json.loads(parsers.response) == GEMMA
    assert Parsers("mistral").resolve_for(described(tmp_path, HERMES)).tools == "mistral"
    assert Parsers(UNKNOWN, NONE) == Parsers(UNKNOWN, NONE).resolve_for(
        described(tmp_path, HERMES)
    )


def hermes(**members: object) -> dict[str, Any]:
    """`HERMES`, with other members of its calls; those that are None are left out."""
    region = {**HERMES["fields"]["tool_calls"], **members}
    region = {key: value for key, value in region.items() if value is not None}
    return {**HERMES, "fields": {**HERMES["fields"], "tool_calls": region}}


def content(**members: object) -> dict[str, Any]:
    return {**HERMES, "fields": {**HERMES["fields"], "content": members}}


@pytest.mark.parametrize(
    "template",
    [
        {"fields": {}},
        {"fields": {"x": {"open": "("}}},
        5,
        ["x"],
        {**HERMES, "start_anchor": 5},
        {**HERMES, "start_anchor": ""},
        hermes(open_pattern="("),
        hermes(content_args=5),
        hermes(content_args=["x"]),
        hermes(content="strange"),
        hermes(open_pattern="x*"),
        hermes(open_pattern="(?!a)"),
        hermes(close=None, close_pattern="z*"),
        content(close_pattern="z*"),
        content(close_pattern=""),
    ],
)
def test_a_template_that_does_not_load_is_ignored(
    tmp_path: Path, template: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "minfer.tools"):
        parsers = Parsers().resolve_for(described(tmp_path, template))
    assert parsers.tools == "hermes"
    assert "the checkpoint's response_template" in caplog.text


@pytest.mark.parametrize(
    "members",
    [
        {"content": "xml-inline", "content_args": {"tag_pattern": "("}},
        {"content_args": {"string_delims": 5}},
        {
            "content": "xml-inline",
            "content_args": {"tag_pattern": "(?P<key>n)", "value_parser": 5},
        },
        {"transform": 5},
        {"transform": {"function": 5}},
        {"open_pattern": "(?=<tool_call>)"},
    ],
)
def test_what_a_template_cannot_parse_stays_text(members: dict[str, Any]) -> None:
    parsed = read(parsing(hermes(**members)), f"w1{CALL}w2")
    assert (parsed.content, parsed.calls) == (f"w1{CALL}w2", [])


SLOW_TAG: Final = "(?P<key>x)(?P<value>(y|y)*)[zw]"
SLOW_WITHIN: Final = {
    "tag_pattern": "(?P<key>x)(?P<value>y*)",
    "value_parser": {"name": "xml-inline", "args": {"tag_pattern": "(y|y)*[zw]"}},
}
LINES: Final = {"value_parser": {"name": "xml-inline", "args": {"tag_pattern": SLOW_TAG}}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "text"),
    [
        *(
            (hermes(content=content, content_args=args), f"<tool_call>{text}</tool_call>")
            for content, args, text in (
                ("xml-inline", {"tag_pattern": SLOW_TAG}, f"x{'y' * 40}"),
                ("xml-inline", SLOW_WITHIN, f"x{'y' * 40}"),
                ("kv-lines", LINES, f"k:x{'y' * 40}"),
                ("json", {"string_delims": [["<<", ">>"]]}, "<<" * 100_000),
                ("json", {"unquoted_keys": True}, '"' + '\\"' * 50_000),
            )
        ),
        (hermes(close=None, close_pattern="(x|x)*y"), f"<tool_call>{'x' * 40}z"),
        (hermes(open_pattern="(x|x)*y"), "x" * 40),
        (content(close_pattern="(x|x)*y"), "x" * 40),
        (HERMES, " " * 200_000 + "x"),  # `\s*` before a marker
        (HERMES, "\n" * 100_000 + "<tool" * 20_000),
    ],
)
def test_patterns_that_take_long_are_given_up(
    template: dict[str, Any], text: str
) -> None:
    for size in (len(text), 8):
        reader = parsing(template).parser()
        start = time.process_time()
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        parsed = reported(fed(reader, pieces))
        assert time.process_time() - start < 2
        assert (parsed.content, parsed.calls) == (text, [])


def test_a_start_anchor_that_takes_long_does_not_show() -> None:
    template = {
        "start_anchor_pattern": "(x|x)*y",
        "fields": HERMES["fields"],
    }
    assert answer_prefix(json.dumps(template), "x" * 40) == ""
