"""Harmony, the format of gpt-oss: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>
        {...}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The template has written the first `<|start|>assistant`. Analysis is reasoning, a message
to a function is a call, and all else is content. JSON, of a call or of an answer, is
parsed as JSON: its strings may contain texts that are end marks elsewhere. Messages
without an end mark, and text outside of messages, are parsed as far as possible. Words of
a header that are not the format's own are text: before that of the message, or after
the call.
"""

import re
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.calls import NAME, stream_arguments, value
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import Offered
from minfer.effects.text.tools.source import (
    Reading,
    Source,
    ahead,
    char,
    repeats,
    space,
    until,
)

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
STOPS: Final = (*ENDS, START, CHANNEL)  # a message ends before them
TO: Final = " to="  # a recipient
_HEADS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, TO)  # beginnings of an answer
_LONGEST: Final = 256  # characters of a header
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION: Final = re.compile(rf"\bto=functions\.({NAME})(?=[\s<]|\Z)")
# What a header has beside the name of a function: roles, channels and types of content.
_WORDS: Final = ("assistant", "analysis", "commentary", "final", "json", "code", "text")
_OWN: Final = re.compile(rf"{'|'.join(map(re.escape, MARKERS))}|\b({'|'.join(_WORDS)})\b")
_BEGINNINGS: Final = (*MARKERS, *_WORDS, f"{TO.strip()}functions.")  # that may be cut off
_NOT_IN_HEADERS: Final = ("{", "\n")
_JSON: Final = ("{", "[")  # beginnings of an answer that may have to match a schema
_NONE: Final = "{}"  # arguments of a call without any


@frozen
class _MessageHeader:
    """The header of a message."""

    text: str
    whole: bool  # up to the marker of the message itself
    cut: bool  # the text ended within

    @property
    def function(self) -> str:
        """The name of the called function, if any."""
        match = _FUNCTION.search(self.text)
        return match[1] if match else ""

    @property
    def channel(self) -> str:
        """The channel of the message, if there is one."""
        match = _CHANNEL.search(self.text)
        return match[1] if match else ""

    @property
    def is_analysis(self) -> bool:
        """Whether the message is reasoning."""
        return self.channel == "analysis" and not self.function

    @property
    def foreign(self) -> str:
        """The words that are not the format's own, nor the name of the function."""
        return " ".join(_OWN.sub(" ", _FUNCTION.sub(" ", self.text, 1)).split())

    @property
    def is_own_beginning(self) -> bool:
        """Whether the text ended within a header that has nothing to show yet."""
        if not self.cut or self.function:
            return False
        foreign = self.foreign
        is_partial_word = any(word.startswith(foreign) for word in _BEGINNINGS)
        return not foreign or (is_partial_word and self.text.endswith(foreign))


def is_analysis(header: str) -> bool:
    """Whether a message with this header is reasoning."""
    return _MessageHeader(header, whole=True, cut=False).is_analysis


@frozen
class Harmony:
    """The format."""

    opens: tuple[str, ...] = ()  # calls are messages: they are not within reasoning

    def read(self, source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:  # noqa: ARG002 - of all readers
        """Read a whole answer."""
        yield from _read(source, out)


def _read(source: Source, out: DeltaWriter) -> Reading[None]:
    marker = ""
    if not (yield from ahead(source, _HEADS)):
        marker = yield from until(source, (*STOPS, MESSAGE), out.content)
        if not marker:
            return
    while True:
        if marker not in ENDS:
            marker = yield from _message(source, out, marker)
        else:
            marker = yield from until(source, STOPS, out.content)
        if not marker:
            return


def _message(source: Source, out: DeltaWriter, prefix: str) -> Reading[str]:
    """Take a message whose header begins with `prefix`; returns the marker after it."""
    header = yield from _header(source, prefix)
    if header.is_own_beginning:
        return ""  # no text yet
    if not header.whole:
        out.content(header.text)
        return (yield from until(source, STOPS, out.content))
    yield from repeats(source, MESSAGE)
    out.mark()
    emit = out.reasoning if header.is_analysis else out.content
    if header.function:
        yield from _call(source, out, header)
        return (yield from until(source, STOPS, emit))
    if header.foreign:
        emit(f"{header.foreign} ")
    if header.channel == "final":
        yield from _answer(source, out)
    return (yield from until(source, STOPS, emit))


def _call(source: Source, out: DeltaWriter, header: _MessageHeader) -> Reading[None]:
    """Take the arguments of a call; other text is content."""
    calls = out.calls
    source.keep(header.text)
    yield from space(source)
    first = yield from char(source)
    if first == "{":
        complete = yield from stream_arguments(source, out, header.function)
    else:
        complete = not first or bool((yield from ahead(source, STOPS)))
        if complete:
            out.start(header.function)
            out.arguments(_NONE)
            out.end(whole=True)
    left = source.kept()
    if out.calls > calls and header.foreign:
        out.content(header.foreign)
        out.mark()
    if not complete:
        out.content(left)


def _answer(source: Source, out: DeltaWriter) -> Reading[None]:
    """Take an answer as far as it is a JSON object or list."""
    out.content((yield from space(source)))
    if (yield from char(source)) in _JSON:
        yield from value(source, out.content, mended=False)


def _header(source: Source, prefix: str) -> Reading[_MessageHeader]:
    """Take a header; text that is no header is the message's text."""
    text = marker = prefix
    while marker != MESSAGE:
        marker = yield from ahead(source, MARKERS)
        piece = marker or (yield from char(source))
        is_invalid = piece in _NOT_IN_HEADERS or marker in ENDS or len(text) > _LONGEST
        if is_invalid or not piece:
            cut = not piece and text.startswith((START, CHANNEL))
            return _MessageHeader(text, whole=False, cut=cut)
        text += source.take(len(piece))
    return _MessageHeader(text, whole=True, cut=False)
