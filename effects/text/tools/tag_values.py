"""Values of parameters in tags, as JSON."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.json_scanner import JsonScanner
from minfer.effects.text.tools.python_values import container_json
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    peek_char,
    take_space,
    take_until,
)

_WORDS: Final = {"true": "true", "false": "false", "none": "null", "null": "null"}
_NULL: Final = "null"
Emit = Callable[[str], None]


_MAX_HEAD_CHARS: Final = 256  # characters of the first tags of a call within a value


@frozen(kw_only=True)
class NestedCall:
    """A whole call within a value is part of it, with all its tags."""

    begins: str
    head: re.Pattern[str]  # what else makes this a call
    ends: str

    def follows(self, source: StreamedText) -> Reading[bool]:
        """Whether the rest of a call's head comes next; nothing is taken."""
        while True:
            text = source.text[source.position : source.position + _MAX_HEAD_CHARS]
            if self.head.match(text):
                return True
            if source.ended or len(text) == _MAX_HEAD_CHARS:
                return False
            yield

    def read(self, source: StreamedText, emit: Emit) -> Reading[None]:
        """Take a call, if its head comes next, up to its end; emit it as text."""
        depth = int((yield from self.follows(source)))
        while depth:
            marker = yield from take_until(source, [self.begins, self.ends], emit)
            emit(marker)
            if marker != self.begins:
                depth = depth - 1 if marker else 0
            elif (yield from self.follows(source)):
                depth += 1


@frozen(kw_only=True)
class ValueEnds:
    """What may come after a value."""

    sure: tuple[str, ...]
    # These are only the end if one of `follow` comes next, or the end of the text: else
    # they are part of the value.
    unsure: tuple[str, ...]
    follow: tuple[str, ...]
    nested: NestedCall

    def read(self, source: StreamedText, emit: Emit) -> Reading[str]:
        """Take a value and emit it; returns the tag after it."""
        markers = (*self.sure, *self.unsure, self.nested.begins)
        while True:
            marker = yield from take_until(source, markers, emit)
            if marker == self.nested.begins:
                emit(marker)
                yield from self.nested.read(source, emit)
                continue
            if marker not in self.unsure:
                return marker
            gap = yield from take_space(source)
            after = yield from peek_char(source)
            if not after or (yield from peek_any(source, self.follow)):
                return marker
            emit(marker + gap)


TakeValue = Callable[[StreamedText, DeltaWriter, ValueEnds], Reading[str]]


def text_value(source: StreamedText, out: DeltaWriter, ends: ValueEnds) -> Reading[str]:
    """Take a value that is text; returns the tag after it."""
    out.arguments('"')
    marker = yield from ends.read(source, lambda text: out.arguments(_inner(text)))
    if marker:
        out.arguments('"')
    return marker


def nullable_value(
    source: StreamedText, out: DeltaWriter, ends: ValueEnds
) -> Reading[str]:
    """Take a value that is text, or null; returns the tag after it."""
    text = ""
    open_string = False

    def emit(piece: str) -> None:
        nonlocal text, open_string
        text += piece if not open_string else ""
        if open_string:
            out.arguments(_inner(piece))
        elif not _NULL.startswith(text):
            open_string = True
            out.arguments(quoted(text)[:-1])

    marker = yield from ends.read(source, emit)
    if not open_string:
        complete_value = _NULL if text == _NULL else quoted(text)
        out.arguments(complete_value if marker else quoted(text)[:-1])
    elif marker:
        out.arguments('"')
    return marker


def typed_value(source: StreamedText, out: DeltaWriter, ends: ValueEnds) -> Reading[str]:
    """Take a value that is no text; returns the tag after it."""
    pieces: list[str] = []
    marker = yield from ends.read(source, pieces.append)
    value = "".join(pieces)
    out.arguments(
        json_of(value)
        if marker
        else partial_json(without_partial_tag(value, (*ends.sure, *ends.unsure)))
    )
    return marker


def without_partial_tag(text: str, tags: Sequence[str]) -> str:
    """A text without an incomplete tag at its end."""
    start = text.rfind("<")
    is_partial = start >= 0 and any(tag.strip().startswith(text[start:]) for tag in tags)
    return text[:start] if is_partial else text


def json_of(value: str) -> str:
    """A value as JSON: it is that, or Python's notation, or else text."""
    text = value.strip()
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.end()
    if scanner.done and end == len(text):
        return scanner.take_accepted()
    return _WORDS.get(text.lower()) or container_json(text) or quoted(value)


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _inner(text: str) -> str:
    return quoted(text)[1:-1]


def partial_json(value: str) -> str:
    """An incomplete value, as the beginning of JSON."""
    text = value.strip()
    scanner = JsonScanner()
    begins = scanner.feed(text) == len(text)
    return scanner.take_accepted() if begins else quoted(value)[:-1]
