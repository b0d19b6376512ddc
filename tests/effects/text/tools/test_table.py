"""Every format of the table: what it writes it reads, however the text is cut."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from minfer.effects.text.tools.formats import Parsers, Parsing
from minfer.effects.text.tools.table import ALIASES, HARMONY, ROWS, TOOLS
from minfer.effects.text.tools.tags import Tags
from tests.circles import claimed, long, seeds
from tests.effects.text.tools.cuts import Found, fed, reported
from tests.effects.text.tools.samples import MARKERS, NASTY, WRITTEN, answer, schema

FORMATS = (*WRITTEN, HARMONY)
each = pytest.mark.parametrize("name", FORMATS)
# Formats in which a text may have any marker: strings are in quotes.
MARKED = [name for name in FORMATS if TOOLS[name].begins_with_marker]
QUOTED = [name for name in FORMATS if not isinstance(TOOLS[name].dialect, Tags)]


def parsing(name: str, *tools: Mapping[str, Any], reasoning: str = "none") -> Parsing:
    offered = {f"f{i}.x" if i else "f": schema(tool) for i, tool in enumerate(tools)}
    chosen = Parsers(name, reasoning).parsing(offered, "")
    assert chosen is not None
    return chosen


def pieces(text: str, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    while text:
        size = draw.choice((0, 1, 2, 3, 5, 20))
        yield text[:size]
        text = text[size:]


def few_cuts(text: str) -> Iterator[Sequence[str]]:
    """The text in characters, in about tokens, by chance, and in two at some borders."""
    yield list(text)
    yield [text[start : start + 4] for start in range(0, len(text), 4)]
    for seed in range(3):
        yield [*pieces(text, seed)]
    for start in range(1, len(text), 1 + len(text) // 20):
        yield [text[:start], text[start:]]


def bare(name: str, text: str) -> str:
    """A text without white space, and without the markers around answers."""
    for marker in TOOLS[name].around:
        text = text.replace(marker, "")
    return "".join(text.split())


def read(parsing: Parsing, text: str, *, every_cut: bool = False) -> Found:
    first = fed(parsing.parser(), [text])
    borders = range(1, len(text)) if every_cut else ()
    for cut in [*few_cuts(text), *([text[:border], text[border:]] for border in borders)]:
        assert fed(parsing.parser(), cut) == first, cut
    assert fed(parsing.parser(streaming=False), [text]) == first
    return reported(first)


@each
def test_nasty_arguments_come_back(name: str) -> None:
    chosen = parsing(name, NASTY, {})
    text = answer(name, [("f", NASTY)])
    parsed = read(chosen, text)
    assert parsed.parsed == [("f", NASTY)]
    assert (parsed.content, parsed.reasoning, parsed.whole) == ("", "", [True])


@pytest.mark.claimed
@each
def test_cuts_at_every_position_change_nothing(name: str) -> None:
    arguments = {key: NASTY[key] for key in ("markup", "count", "object")}
    text = answer(name, [("f", arguments), ("f1.x", {})])
    parsed = read(parsing(name, arguments, {}), f"{text}", every_cut=True)
    assert parsed.parsed == [("f", arguments), ("f1.x", {})]


@each
def test_text_and_reasoning_around_calls(name: str) -> None:
    arguments = {"markup": NASTY["markup"], "count": 3}
    calls = answer(name, [("f", arguments), ("f1.x", {"flag": True})])
    if name == HARMONY or not TOOLS[name].begins_with_marker:
        return  # calls are at the beginning, or in messages
    chosen = parsing(name, arguments, {"flag": True}, reasoning="think")
    parsed = read(chosen, f"<think>Hm: {calls}</think>I look.\n{calls}\nDone.")
    assert parsed.parsed == [("f", arguments), ("f1.x", {"flag": True})]
    assert parsed.reasoning == f"Hm: {calls}"
    assert parsed.content == "I look.\n\nDone."


@pytest.mark.parametrize("name", QUOTED)
def test_strings_that_have_markers_in_them(name: str) -> None:
    quote = getattr(TOOLS[name].dialect, "quote", None)
    text = MARKERS.replace(quote, "") if quote else MARKERS
    parsed = read(parsing(name, {"text": ""}), answer(name, [("f", {"text": text})]))
    assert parsed.parsed == [("f", {"text": text})]


@pytest.mark.parametrize("step", [*long([13]), *claimed([1])])
@each
def test_answers_that_break_off(name: str, step: int) -> None:
    """No call is whole that is not, and no word of the answer is lost."""
    arguments = {"first": "w1w w2w", "second": {"a": "w3w"}, "third": 4}
    text = "w0w " * (name in MARKED) + answer(name, [("f", arguments)] * 2)
    chosen = parsing(name, arguments)
    for end in range(0, len(text), step):
        cut = text[:end]
        for streaming in (True, False):
            parsed = reported(fed(chosen.parser(streaming=streaming), [cut]))
            whole_calls = [
                c for c, ok in zip(parsed.calls, parsed.whole, strict=True) if ok
            ]
            if name != HARMONY:  # a call without arguments looks like one that is cut
                read_back = [json.loads(args) for _, args in whole_calls]
                assert read_back == [arguments] * len(whole_calls)
            emitted = parsed.content + "".join(map("".join, parsed.calls))
            for word in ("w0w", "w1w", "w2w", "w3w"):
                assert emitted.count(word) == cut.count(word), (cut, parsed)


@pytest.mark.long
@each
def test_what_is_nearly_a_call_stays_text(name: str) -> None:
    text = answer(name, [("f", {"first": "w1w", "second": 2})])
    chosen = parsing(name, {"first": "", "second": 0})
    draw = random.Random(name)
    for _ in range(20):
        place = draw.randrange(len(text))
        broken = (
            text[:place]
            + draw.choice(("", "w2w", "{", "}", "<", '"'))
            + text[place + 1 :]
        )
        parsed = reported(fed(chosen.parser(streaming=False), [broken]))
        assert reported(fed(chosen.parser(streaming=False), list(broken))) == parsed
        if not parsed.calls and name != HARMONY:
            assert bare(name, parsed.content) == bare(name, broken)


@pytest.mark.parametrize("name", [*FORMATS, "minimax_m3"])
def test_markers_that_may_be_special_tokens_are_not_skipped(name: str) -> None:
    text = answer(name, [("f", {"city": "x", "days": 3})] * 2)
    tokens = set(
        re.findall(r"<\|[^<>\s]+?\|>|<\|\w+>|<\w+\|>|<｜[^<>｜]+｜>|\[[A-Z_]+\]", text)
    )
    tokens |= {
        marker
        for marker in ("<tool_call>", "｜DSML｜", "]<]minimax[>[")
        if marker in text
    }
    assert tokens <= set(parsing(name, {}).markers)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names_are_the_same_format(alias: str) -> None:
    assert TOOLS[alias] is ROWS[ALIASES[alias]]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_null_of_a_parameter_that_may_be_text(name: str) -> None:
    maybe = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tool = {"type": "object", "properties": {"a": maybe, "b": {"type": "string"}}}
    chosen = Parsers(name, "none").parsing({"f": tool}, "")
    assert chosen is not None
    for text, value in (
        ("null", None),
        ("nullable", "nullable"),
        ("nul", "nul"),
        ("", ""),
    ):
        parsed = read(chosen, answer(name, [("f", {"a": text, "b": "null"})]))
        assert parsed.parsed == [("f", {"a": value, "b": "null"})]


def broken(texts: Sequence[str], draw: random.Random) -> str:
    """Answers that are cut, doubled, nested, and that have words in them."""
    pieces = []
    for _ in range(draw.randrange(1, 4)):
        text = draw.choice(texts)
        start = draw.randrange(len(text))
        end = start + draw.randrange(12)
        ways = (
            text[:start],
            text[:start] + text[end:],
            text[:start] + text + text[start:],
            text,
        )
        pieces += [draw.choice(ways), draw.choice(("", "w4w", "\n"))]
    return "".join(pieces)


@seeds(few=12, many=300)
@pytest.mark.parametrize("name", [*FORMATS, "minimax_m3"])
def test_broken_answers(name: str, seeds: range) -> None:
    """Nothing raises, whole calls are JSON, cuts change nothing, and no word is lost."""
    arguments = {"text": "w1w x", "count": 3, "object": {"k": [1]}}
    chosen = parsing(name, arguments, {})
    texts = [
        answer(name, [("f", arguments)]),
        answer(name, [("f1.x", {}), ("f", arguments)]),
    ]
    for seed in seeds:
        text = broken(texts, random.Random(seed))
        for streaming in (True, False):
            first = fed(chosen.parser(streaming=streaming), [text])
            assert fed(chosen.parser(streaming=streaming), list(text)) == first, text
            parsed = reported(first)
            for (_, written), is_whole in zip(parsed.calls, parsed.whole, strict=True):
                assert not is_whole or isinstance(json.loads(written), dict)
            emitted = parsed.content + "".join(map("".join, parsed.calls))
            for word in ("w1w", "w4w") if name != HARMONY else ():
                assert emitted.count(word) >= text.count(word), text
