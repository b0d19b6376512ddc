"""All formats at once: chance texts, cost, ids."""

import random
import re
import time

import pytest

from minfer.effects.text.tools.deltas import CallStart
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import ROWS, TOOLS
from tests.circles import claimed, long
from tests.effects.text.tools.cuts import OFFERED, fed, found, parser, reported
from tests.effects.text.tools.samples import answer

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
    '{"name": "add", "arguments": ',
    '{"name": "add", "arguments": {"a": 1}}',
    '"name": "now"',
    '"arguments"',
    '"parameters": ',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "null",
    "12",
    " ",
    "\n",
    ";",
    "<",
    "<tool",
    "é🙂",
    '{"a": "x"}',
    "add",
]
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    "<function=strange>",
    "</function>",
    "<parameter=a>",
    "<parameter=c>",
    "</parameter>",
    "<think>",
    "</think>",
    "<function",
    "<",
    "1",
    '"',
    " ",
    "\n",
]
TOKENS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool",
    "</think>",
    "function",
    "add",
    "```json",
    "```",
    "{",
    "}",
    '{"a": 1}',
    " ",
    "\n",
]
CHANNELS = [
    "<|channel|>",
    "<|message|>",
    "<|start|>assistant",
    "<|end|>",
    "analysis",
    "final",
    "commentary to=functions.add",
    "<|constrain|>json",
    "<|call|>",
    '{"a": 1}',
    " ",
    "{",
    "}",
]
OWN = {
    "openai": CHANNELS,
    "qwen3_coder": TAGS,
    "deepseek_v3": TOKENS,
    "deepseek_v31": TOKENS,
    "hermes": PIECES,
    "llama3_json": PIECES,
    "mistral": PIECES,
    "json": PIECES,
}
# Pieces of texts in formats that are not above, beside their own markers.
OTHERS = [
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        "add",
        "add(",
        "a=1",
        "now()",
        "call:add{",
    ),
    *('{"a": 1}', "{", "}", "[", "]", ")", ",", ":", '"', "'", ">", "<", " ", "\n", "1"),
    *("<think>", "</think>", "functions.add:0", "function"),
]
CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


def pieces(text: str, draw: random.Random) -> list[str]:
    cut = []
    while text:
        size = draw.choice((1, 1, 2, 3, 7, 30))
        cut.append(text[:size])
        text = text[size:]
    return cut


@pytest.mark.parametrize(
    "name", [*long([None, *OWN]), *claimed(sorted({*ROWS} - {*OWN}))]
)
def test_chance_texts(name: str | None) -> None:
    """Nothing raises, cuts change nothing, and no word is lost."""
    form = ROWS.get(name or "")
    own_markers = (
        [*form.opens, *form.markers, *getattr(form.dialect, "literals", ())]
        if form
        else []
    )
    for seed in range(300 if name is None or name in OWN else 100):
        draw = random.Random(seed)
        markers = OWN.get(name or "hermes") or [*own_markers, *OTHERS]
        words = [draw.choice(markers) for _ in range(draw.randrange(1, 14))]
        for word in range(draw.randrange(4)):
            words.insert(draw.randrange(len(words) + 1), f"w{word}w")
        text = "".join(words)
        reasoning = None if name == "openai" or draw.random() < 0.5 else "think"
        opened = draw.random() < 0.5
        first = fed(parser(name, reasoning, opened=opened), [text])
        for cut in (list(text), pieces(text, draw), pieces(text, draw)):
            assert fed(parser(name, reasoning, opened=opened), cut) == first, text
        parsed = reported(first)
        emitted = parsed.content + parsed.reasoning + "".join(map("".join, parsed.calls))
        for word in re.findall(r"w\dw", text if name != "openai" else ""):
            assert word in emitted, text


_ADD = '{"name": "add", "arguments": {"a": 1}}'
_TAGGED = "<tool_call>\n<function=add>\n<parameter=c>\n1\n</parameter>\n</function>"
_DEEP = f"{CALL}add<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_CHANNEL = "commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
# Calls in each format, and the markers that models write twice.
REPEATED = {
    "hermes": (f"<tool_call>{_ADD}</tool_call>", r"</?tool_call>"),
    "llama3_json": (f"<|python_tag|>{_ADD}", r"<\|python_tag\|>"),
    "mistral": (f"[TOOL_CALLS]{_ADD}[TOOL_CALLS]add[ARGS]{{}}", r"\[TOOL_CALLS\]"),
    "qwen3_coder": (f"{_TAGGED}\n</tool_call>", r"</?tool_call>|</function>"),
    "deepseek_v31": (_DEEP, r"<｜[^｜]*｜>"),
    "openai": (f"<|start|>assistant<|channel|>{_CHANNEL}", r"<\|(?:message|call)\|>"),
}


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
@pytest.mark.parametrize("name", REPEATED)
def test_a_marker_that_is_repeated_counts_once(name: str, between: str) -> None:
    answer, markers = REPEATED[name]
    plain = found(answer, name)
    assert plain.calls
    assert not plain.content
    for mark in re.finditer(markers, answer):
        repeated = answer[: mark.end()] + between + answer[mark.start() :]
        assert found(repeated, name) == plain, repeated


# Beginnings of texts that do not end, in the formats of `OWN`.
BEGINS = {
    "hermes": '<tool_call>{"arguments": {"a": "',
    "llama3_json": '{"name": "add", "parameters": {"a": "',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": "',
    "json": '[{"parameters": {"a": "',
    "openai": "<|channel|>final<|message|>",
    "qwen3_coder": "<function=add>",
    "deepseek_v3": f"{CALL}function<｜tool▁sep｜>",
    "deepseek_v31": f'{CALL}add<｜tool▁sep｜>{{"a": "',
}


def written_begins(name: str) -> str:
    """The beginning of a call with a text that does not end."""
    text = answer(name, [("get_weather", {"city": "x"})])
    return text[: text.index("x", text.index("city")) + 1]


@pytest.mark.parametrize(
    "name", [*long(BEGINS), *claimed(sorted({*ROWS} - {*BEGINS, "kimi_k3"}))]
)
def test_cost_is_linear(name: str) -> None:
    """Four times the text takes about four times as long, one character at a time."""

    def seconds(size: int) -> float:
        reader = parser(name)
        start = time.process_time()
        reader.push(BEGINS[name] if name in BEGINS else written_begins(name))
        for _ in range(size):
            reader.push("x ")
        reader.push("", final=True)
        return time.process_time() - start

    few_seconds, many_seconds = (
        min(seconds(size) for _ in range(3)) for size in (4_000, 32_000)
    )
    assert many_seconds < 30 * few_seconds


def test_ids() -> None:
    text = "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{}"
    first, second = (
        delta.id
        for delta in Parser(TOOLS["mistral"], OFFERED).push(text, final=True)
        if isinstance(delta, CallStart)
    )
    assert first != second
    assert re.fullmatch("[a-zA-Z0-9]{9}", first)
    assert re.fullmatch("call_[a-zA-Z0-9]{24}", TOOLS["hermes"].new_id())


def test_nothing_comes_after_the_end() -> None:
    reader = parser("hermes")
    reader.push("x", final=True)
    assert reader.push("y", final=True) == []
