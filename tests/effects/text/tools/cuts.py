"""Recorded answers, cut in every way: what comes of them must be the same."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merge,
)
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.thinking import REASONING

OFFERED = OfferedTools(
    frozenset({"get_weather", "add", "now"}),
    frozenset({("get_weather", "days"), ("add", "a"), ("add", "b")}),
)


@define
class Found:
    """All that a parser told of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(factory=list)  # name and arguments
    whole: list[bool] = field(factory=list)

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        """Calls, with what their arguments say."""
        return [(name, json.loads(text)) for name, text in self.calls]


def parser(
    tools: str | None,
    reasoning: str | None = None,
    *,
    opened: bool = False,
    streaming: bool = True,
) -> Parser:
    form = None if tools is None else TOOLS[tools]
    thinking = None if reasoning is None else REASONING[reasoning]
    return Parser(form, OFFERED, thinking, opened=opened, streaming=streaming)


def fed(reader: Parser, pieces: Iterable[str]) -> list[Delta]:
    """What a parser tells of pieces, as few deltas as it can be, and ids left out."""
    deltas: list[Delta] = []
    ids = set()
    for delta in [d for p in pieces for d in reader.push(p)] + reader.push(
        "", final=True
    ):
        if isinstance(delta, CallStart):
            assert delta.id not in ids
            ids.add(delta.id)
            deltas.append(CallStart(delta.index, "", delta.name))
        elif deltas and (merged := merge(deltas[-1], delta)) is not None:
            deltas[-1] = merged
        else:
            deltas.append(delta)
    return deltas


def cuts(text: str, rolls: int = 8) -> Iterable[Sequence[str]]:
    """The text in one piece, in two at every border, in characters, and by chance."""
    yield [text]
    yield list(text)
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]
    for seed in range(rolls):
        draw = random.Random(seed)
        cut, pieces = 0, []
        while cut < len(text):
            size = draw.choice((0, 1, 1, 2, 3, 5, 8, 20))
            pieces.append(text[cut : cut + size])
            cut += size
        yield pieces


def found(
    text: str, tools: str | None, *reasoning_format: str, opened: bool = False
) -> Found:
    """What is found in an answer, however it is cut."""
    first = fed(parser(tools, *reasoning_format, opened=opened), [text])
    for pieces in cuts(text):
        assert fed(parser(tools, *reasoning_format, opened=opened), pieces) == first, (
            pieces
        )
    return reported(first)


def in_one_piece(text: str, tools: str) -> Found:
    """What is found in an answer that is not streamed."""
    first = fed(parser(tools, streaming=False), [text])
    assert fed(parser(tools, streaming=False), list(text)) == first
    return reported(first)


def reported(deltas: Iterable[Delta]) -> Found:
    """Deltas put together, as a client does; they must be in order."""
    all_of = Found()
    running = False
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                assert not running
                all_of.content += text
            case ReasoningDelta(text):
                assert text
                assert not running
                all_of.reasoning += text
            case CallStart(index, _, name):
                assert not running
                assert index == len(all_of.calls)
                running = True
                all_of.calls.append((name, ""))
            case Arguments(index, text):
                assert running
                assert text
                assert index == len(all_of.calls) - 1
                name, before = all_of.calls[-1]
                all_of.calls[-1] = (name, before + text)
            case CallEnd(index, whole):
                assert running
                assert index == len(all_of.calls) - 1
                running = False
                all_of.whole.append(whole)
    assert not running
    return all_of
