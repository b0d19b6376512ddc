"""Calls whose name is in a header, before the JSON object of their arguments.

    [TOOL_CALLS]NAME[ARGS]{...}
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...

A header is a pattern in which `{name}` is the call's name, `{id}` any word and `{index}`
a number; white space in it may be any. Some formats have several.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Final

from attrs import define, field

from minfer.effects.text.tools.calls import (
    NAME,
    skip_stray,
    stream_arguments,
    take_calls,
)
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.sections import sections
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    peek_char,
    take_matching,
    take_repeats,
    take_space,
)

_MAX_HEADER_CHARS: Final = 256  # characters of a header
_BACKTICK: Final = re.compile("`")
_BACKTICKS: Final = re.compile("`*")
_OBJECT_BEGINNINGS: Final = ("[", "{")  # beginnings of calls as objects
_FIELDS: Final = {
    "{name}": rf"(?P<name>{NAME})",
    "{id}": r"[\w.:/-]*?",
    "{index}": r"[0-9]+",
}


@define(frozen=True, slots=False, kw_only=True)
class Headers:
    """A format whose calls have a header and JSON."""

    call: str  # the marker before each call
    heads: tuple[str, ...]  # between that marker and the arguments
    ends: str = ""  # the marker after each call
    group: str = ""  # the marker before all calls
    group_ends: str = ""
    lists: bool = False  # there may be a list of objects in place of a header
    offered: bool = False  # only names of the request's tools are names
    others: tuple[str, ...] = field(default=())  # markers within headers
    # The first call may lack the marker: it is at the end of the prompt.
    begun: bool = False
    drops: tuple[str, ...] = ()  # markers around an answer

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        return (self.group, self.call) if self.group else (self.call,)

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""

        def body(marker: str) -> Reading[bool]:
            return (yield from self._calls(source, out, tools, marker))

        if self.begun:
            yield from self._first_call(source, out, tools)
        closes = [
            marker for marker in (self.ends, self.group_ends, *self.others) if marker
        ]
        yield from sections(
            source, out, self.opens, body, closes=closes, drops=self.drops
        )

    def _first_call(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Take a call at the beginning, whose marker may be in the prompt."""
        drop_ends = [marker.removeprefix(self.call) for marker in self.drops]
        if word := (yield from peek_any(source, drop_ends)):
            source.take(len(word))
            out.mark()
            return
        source.keep()
        yield from self._call(source, out, tools)
        left = source.take_kept()
        out.content(left)

    def _calls(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools, marker: str
    ) -> Reading[bool]:
        """Take calls up to their common end; returns whether there is nothing else."""
        if marker == self.group:
            yield from take_repeats(source, marker)
            if not (yield from peek_any(source, [self.call])):
                return False
            source.take(len(self.call))
        while (yield from self._call(source, out, tools)):
            source.keep()
            if not self.group_ends:
                return True
            yield from take_space(source)
            after = yield from peek_any(source, [self.call, self.group_ends])
            source.take(len(after))
            if after != self.call:
                return after == self.group_ends or not (yield from peek_char(source))
        return False

    def _call(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[bool]:
        """Take one call, up to its end; returns whether it is complete."""
        yield from take_repeats(source, self.call)
        if self.lists and (yield from peek_char(source)) in _OBJECT_BEGINNINGS:
            complete = yield from take_calls(source, out)
        else:
            name = yield from self._name(source)
            if not name or (self.offered and name not in tools.names):
                return False
            complete = yield from stream_arguments(source, out, name)
        if not complete:
            return False
        yield from skip_stray(source)
        if any(map(_BACKTICK.search, self.heads)):
            yield from take_matching(source, _BACKTICKS)
            yield from take_space(source)
        if self.ends and (yield from peek_any(source, [self.ends])):
            source.take(len(self.ends))
            return True
        return not self.group_ends or not (yield from peek_char(source))

    def _name(self, source: StreamedText) -> Reading[str]:
        """Take a header; returns the name in it, or an empty string if it is none."""
        while True:
            brace = source.text.find(
                "{", source.position, source.position + _MAX_HEADER_CHARS + 1
            )
            if brace >= 0:
                matches = (
                    pattern.fullmatch(source.text, source.position, brace)
                    for pattern in self._patterns
                )
                match = next(filter(None, matches), None)
                source.take(brace - source.position if match else 0)
                return match["name"] if match else ""
            if source.ended or len(source.text) - source.position > _MAX_HEADER_CHARS:
                return ""
            yield

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [_pattern(head, self.others) for head in self.heads]


def _pattern(head: str, markers: Sequence[str]) -> re.Pattern[str]:
    """A header as a pattern; markers may be repeated."""
    texts = re.split("|".join(map(re.escape, [*_FIELDS, *markers])), head)
    tokens = re.findall("|".join(map(re.escape, [*_FIELDS, *markers])), head)
    pieces = [r"\s*"]
    for text, token in zip_longest(texts, tokens, fillvalue=""):
        pieces += [rf"{re.escape(word)}\s*" for word in text.split()]
        if token in _FIELDS:
            pieces.append(rf"{_FIELDS[token]}\s*")
        elif token:
            pieces.append(rf"(?:{re.escape(token)}\s*)+")
    return re.compile("".join(pieces))
