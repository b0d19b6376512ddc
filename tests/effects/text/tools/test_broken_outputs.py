"""Broken outputs: nothing raises, no text is lost, and no call is invented."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import HARMONY, ROWS, TOOLS
from minfer.effects.text.tools.thinking import REASONING
from tests.effects.text.tools.broken_outputs import BROKEN, Broken
from tests.effects.text.tools.cuts import Found, fed, parser, reported

each = pytest.mark.parametrize(
    "broken",
    BROKEN,
    ids=lambda broken: f"{broken.kind}-{broken.format}".replace(" ", "_"),
)


def made(broken: Broken, *, streaming: bool) -> Parser:
    reasoning = None if broken.format == HARMONY else broken.reasoning
    return parser(broken.format, reasoning, streaming=streaming)


def read(broken: Broken, *, streaming: bool) -> Found:
    """What is found, whole, by character, and cut at every position."""
    first = fed(made(broken, streaming=streaming), [broken.text])
    step = 1 + len(broken.text) // 300
    halves = (
        [broken.text[:cut], broken.text[cut:]] for cut in range(1, len(broken.text), step)
    )
    for pieces in ([*broken.text], *halves):
        assert fed(made(broken, streaming=streaming), pieces) == first, pieces
    return reported(first)


def words(text: str) -> list[str]:
    return re.findall(r"w\dw", text)


def letters(broken: Broken, text: str) -> str:
    """A text without white space, and without markers that are left out."""
    form, thinking = TOOLS[broken.format], REASONING[broken.reasoning]
    around = (*form.around, *thinking.around, thinking.opens, thinking.closes)
    for marker in around:
        text = text.replace(marker, "")
    return "".join(text.split())


@each
def test_whole_calls_are_those_of_the_output(broken: Broken) -> None:
    streamed, at_once = read(broken, streaming=True), read(broken, streaming=False)
    assert at_once.parsed == [*broken.calls]
    assert all(at_once.whole)
    whole_calls = [
        (name, json.loads(text))
        for (name, text), ok in zip(streamed.calls, streamed.whole, strict=True)
        if ok
    ]
    assert whole_calls == at_once.parsed


@each
def test_no_text_is_lost(broken: Broken) -> None:
    for streaming in (True, False):
        parsed = reported(fed(made(broken, streaming=streaming), [broken.text]))
        emitted = [parsed.reasoning, parsed.content, *map("".join, parsed.calls)]
        assert sorted(words(" ".join(emitted))) == sorted(words(broken.text))
        if not parsed.calls and broken.format != HARMONY:
            kept_letters = letters(broken, parsed.reasoning) + letters(
                broken, parsed.content
            )
            assert kept_letters == letters(broken, broken.text)


SIZE = 200_000
SECONDS = 2.0
# Beginnings, and what follows them until there are `SIZE` characters.
HOSTILE = [
    ("lfm2", "", '<|tool_call_start|>[add(),add(a="'),
    (
        "minimax_m2",
        "<minimax:tool_call>",
        '<invoke name="add"></invoke><invoke name="x">',
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ("hermes", "<think>", '<tool_call>{"name": "add", "arguments": {'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ', "["),
    ("gemma4", "<|tool_call>call:add{a:", "["),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n", "</parameter>  "),
    ("pythonic", "[add(a=", "'"),
]
SHAPES = ["[[[[", "<a", "{", '"', "\\", "<|", " ", "a", ",", "("]


def seconds(name: str, text: str, *, streaming: bool, size: int) -> float:
    thinking = "think" if text.startswith("<think>") else None
    reader = parser(name, thinking, streaming=streaming)
    start = time.process_time()
    for offset in range(0, len(text), size):
        reader.push(text[offset : offset + size])
    reader.push("", final=True)
    return time.process_time() - start


@pytest.mark.long
@pytest.mark.parametrize(("name", "begins", "unit"), HOSTILE)
def test_hostile_outputs_take_linear_time(name: str, begins: str, unit: str) -> None:
    text = begins + unit * (SIZE // len(unit))
    assert seconds(name, text, streaming=False, size=SIZE) < SECONDS


def all_shapes(name: str) -> Iterator[str]:
    form = ROWS[name]
    begins = [*form.opens, *form.markers, ""]
    for begin in dict.fromkeys(begins):
        yield from (begin + shape * (SIZE // len(shape)) for shape in SHAPES)
        if begin:
            yield begin * (SIZE // len(begin))


@pytest.mark.claimed
@pytest.mark.parametrize("name", ROWS)
def test_all_shapes_take_linear_time(name: str) -> None:
    for text in all_shapes(name):
        for streaming, size in ((True, 4), (False, SIZE)):
            assert seconds(name, text, streaming=streaming, size=size) < SECONDS, text[
                :40
            ]
