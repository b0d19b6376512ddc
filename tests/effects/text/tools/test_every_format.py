"""Broken outputs of every format: cut, nested, doubled, with markers in strings, within
reasoning, with wrong names, and with words at any place.
"""

import json
import random
import re
from collections.abc import Iterator

import pytest

from minfer.effects.text.tools.deltas import CallEnd, CallStart, Delta
from minfer.effects.text.tools.table import HARMONY, ROWS
from tests.effects.text.tools.cuts import Found, fed, parser, reported
from tests.effects.text.tools.hand_written import HAND_WRITTEN, names

BREAK = "\0"
WORD = re.compile(r"[a-z]\d[a-z]")
# What names a call for the model itself, and is not for the client.
IDS = re.compile(
    r'"tool_call_id": "[^"]*"|(?<=call:begin\|>)[^<]*(?=<\|tool_call:name)'
    r"|]<]minimax\[>\[</\w+"  # M3's closing tags, which repeat a key
)
all_formats = pytest.mark.parametrize("form", HAND_WRITTEN)


def emitted(deltas: list[Delta]) -> str:
    """All that a client gets, in order. Arguments may break off within a word."""
    text = ""
    for delta in deltas:
        match delta:
            case CallStart(name=name):
                text += f" {name} "
            case CallEnd(complete=whole):
                text += " " if whole else BREAK
            case _:
                text += delta.text
    return re.sub(rf"{BREAK}\s*", "", text)


def pieces(form: str, text: str) -> list[str]:
    """A text cut at markers and words, as a tokenizer may."""
    row = ROWS[form]
    markers = sorted({*row.opens, *row.markers, *row.around}, key=len, reverse=True)
    any_piece = "|".join([*map(re.escape, markers), r"\w+", r"\s+", "."])
    return re.findall(any_piece, text, re.DOTALL)


def read(form: str, text: str, reasoning: str | None = None) -> Found:
    """What is found, however the text comes; checked for losses and inventions."""
    is_whole = []
    for streaming in (True, False):
        first = fed(parser(form, reasoning, streaming=streaming), [text])
        for cut in ([*text], pieces(form, text)):
            assert fed(parser(form, reasoning, streaming=streaming), cut) == first
        left = WORD.findall(emitted(first))
        for word in WORD.findall(IDS.sub("", text)):
            assert word in left, (word, text)
            left.remove(word)
        parsed = reported(first)
        for name, _ in parsed.calls:
            assert name in text
        calls = zip(parsed.calls, parsed.whole, strict=True)
        is_whole.append([call for call, ends in calls if ends])
    assert is_whole[0] == is_whole[1], text
    return parsed


def test_every_format_is_there() -> None:
    assert [*HAND_WRITTEN] == [*ROWS]


@all_formats
def test_a_whole_call_is_read(form: str) -> None:
    parsed = read(form, HAND_WRITTEN[form].answer("get_weather", "w0w"))
    assert names(form, parsed.parsed) == ["get_weather"]
    assert parsed.parsed[0][1] == {"city": "w0w"}
    assert (parsed.content, parsed.reasoning) == ("", "")


@all_formats
def test_doubled_calls_are_two(form: str) -> None:
    answer = HAND_WRITTEN[form].answer("get_weather", "w0w", times=2)
    assert names(form, read(form, answer).parsed) == ["get_weather"] * 2


@pytest.mark.long
@all_formats
def test_a_cut_call_is_no_call_or_the_beginning_of_one(form: str) -> None:
    text = HAND_WRITTEN[form].answer("get_weather", "w0w w1w")
    for cut in range(len(text)):
        parsed = read(form, text[:cut])
        assert all(name in ("get_weather", "now") for name, _ in parsed.calls)
        # The end of sequence, which ends a message without arguments, is not in the text.
        empty = form == HARMONY and text[:cut].endswith("<|message|>")
        arguments = {} if empty else {"city": "w0w w1w"}
        whole_calls = [
            call for call, ends in zip(parsed.calls, parsed.whole, strict=True) if ends
        ]
        assert whole_calls[:1] in (
            [],
            [("get_weather", json.dumps(arguments))],
            [("now", "{}")],
        )
        read(form, f"{text[:cut]}w2w")


@all_formats
def test_a_call_within_a_value_is_text(form: str) -> None:
    hand = HAND_WRITTEN[form]
    if hand.notation == "quoted":
        pytest.skip("a text with the markers around texts cannot be written")
    inner_call = hand.answer("add", "w0w").strip()
    parsed = read(form, hand.answer("get_weather", inner_call))
    assert names(form, parsed.parsed) == ["get_weather"]
    assert parsed.parsed[0][1] == {"city": inner_call}


@all_formats
def test_markers_in_a_text_are_text(form: str) -> None:
    hand = HAND_WRITTEN[form]
    for marker in (*ROWS[form].markers, *ROWS[form].opens):
        parsed = read(form, hand.answer("get_weather", f"w0w {marker} w1w"))
        if hand.notation == "json":
            assert parsed.parsed[0] == ("get_weather", {"city": f"w0w {marker} w1w"})


@all_formats
def test_calls_within_reasoning_are_reasoning(form: str) -> None:
    if form == HARMONY:
        pytest.skip("reasoning is a message, which a marker ends")
    answer = HAND_WRITTEN[form].answer("get_weather", "w0w")
    parsed = read(form, f"<think>w1w {answer} w2w</think>\nw3w", "think")
    assert (parsed.calls, parsed.content) == ([], "w3w")
    assert parsed.reasoning == f"w1w {answer} w2w"
    parsed = read(form, f"<think>w1w</think>{answer}", "think")
    assert names(form, parsed.parsed) == ["get_weather"]


@all_formats
@pytest.mark.parametrize("name", ["a0b c1d", "", ".", ":", "<|x0x|>", "x0x{"])
def test_a_wrong_name_is_text(form: str, name: str) -> None:
    answer = HAND_WRITTEN[form].answer(name, "w0w")
    parsed = read(form, answer)
    name_parts = {
        "now",
        "x0x",
        "a0b" if form == HARMONY else "c1d",
    }  # a name ends at a space
    bad = [called for called, _ in parsed.calls if called not in name_parts]
    explicit = '"NAME"' in HAND_WRITTEN[form].call  # the model says that it is one
    assert not bad or (explicit and name in (".", ":"))


def mutations(form: str, text: str, rng: random.Random) -> Iterator[str]:
    """Texts with words at any place, and tokens that are left out or doubled."""
    for place in range(len(text)):
        yield f"{text[:place]}w8w{text[place:]}"
    cut = pieces(form, text)
    for place in range(len(cut)):
        yield "".join([*cut[:place], " w8w ", *cut[place:]])
        yield "".join([*cut[: place + 1], *cut[place:]])
        for end in range(place + 1, min(place + 6, len(cut) + 1)):
            yield "".join([*cut[:place], *cut[end:]])
            yield "".join([*cut[:end], *cut[place:]])
        other_place = rng.randrange(len(cut))
        first, last = sorted((place, other_place))
        yield "".join([*cut[:first], "w8w", *cut[first:last], " w9w ", *cut[last:]])
        yield "".join([*cut[:first], " w8w ", *cut[first:last]])


@pytest.mark.long
@all_formats
def test_no_mutation_loses_text_or_invents_a_call(form: str) -> None:
    hand = HAND_WRITTEN[form]
    rng = random.Random(form)
    for text in (hand.answer("n0n", "v0v"), f"w0w {hand.answer('n0n', 'v0v', times=2)}"):
        for mutation in dict.fromkeys(mutations(form, text, rng)):  # each once
            for name, _ in read(form, mutation).calls:
                assert re.search(r"\w", name), mutation
