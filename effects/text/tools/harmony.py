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

from minfer.effects.text.tools.calls import NAME, stream_arguments, take_value
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    peek_char,
    take_repeats,
    take_space,
    take_until,
)

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
STOPS: Final = (*ENDS, START, CHANNEL)  # a message ends before them
TO: Final = " to="  # a recipient
_ANSWER_BEGINNINGS: Final = (
    START,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    TO,
)  # beginnings of an answer
_MAX_HEADER_CHARS: Final = 256  # characters of a header
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION: Final = re.compile(rf"\bto=functions\.({NAME})(?=[\s<]|\Z)")
# What a header has beside the name of a function: roles, channels and types of content.
_HEADER_WORDS: Final = (
    "assistant",
    "analysis",
    "commentary",
    "final",
    "json",
    "code",
    "text",
)
_FORMAT_WORD: Final = re.compile(
    rf"{'|'.join(map(re.escape, MARKERS))}|\b({'|'.join(_HEADER_WORDS)})\b"
)
_PARTIAL_WORDS: Final = (
    *MARKERS,
    *_HEADER_WORDS,
    f"{TO.strip()}functions.",
)  # that may be cut off
_NOT_IN_HEADERS: Final = ("{", "\n")
_JSON_BEGINNINGS: Final = (
    "{",
    "[",
)  # beginnings of an answer that may have to match a schema
_NO_ARGUMENTS: Final = "{}"  # arguments of a call without any


@frozen
class _MessageHeader:
    """The header of a message."""

    text: str
    complete: bool  # up to the marker of the message itself
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
        return " ".join(_FORMAT_WORD.sub(" ", _FUNCTION.sub(" ", self.text, 1)).split())

    @property
    def is_unfinished(self) -> bool:
        """Whether the text ended within a header that has nothing to show yet."""
        if not self.cut or self.function:
            return False
        foreign = self.foreign
        is_partial_word = any(word.startswith(foreign) for word in _PARTIAL_WORDS)
        return not foreign or (is_partial_word and self.text.endswith(foreign))


def is_analysis(header: str) -> bool:
    """Whether a message with this header is reasoning."""
    return _MessageHeader(header, complete=True, cut=False).is_analysis


@frozen
class Harmony:
    """The format."""

    opens: tuple[str, ...] = ()  # calls are messages: they are not within reasoning

    def read(
        self,
        source: StreamedText,
        out: DeltaWriter,
        tools: OfferedTools,  # noqa: ARG002 - of all readers
    ) -> Reading[None]:
        """Read a whole answer."""
        yield from _read(source, out)


def _read(source: StreamedText, out: DeltaWriter) -> Reading[None]:
    marker = ""
    if not (yield from peek_any(source, _ANSWER_BEGINNINGS)):
        marker = yield from take_until(source, (*STOPS, MESSAGE), out.content)
        if not marker:
            return
    while True:
        if marker not in ENDS:
            marker = yield from _take_message(source, out, marker)
        else:
            marker = yield from take_until(source, STOPS, out.content)
        if not marker:
            return


def _take_message(source: StreamedText, out: DeltaWriter, prefix: str) -> Reading[str]:
    """Take a message whose header begins with `prefix`; returns the marker after it."""
    header = yield from _take_header(source, prefix)
    if header.is_unfinished:
        return ""  # no text yet
    if not header.complete:
        out.content(header.text)
        return (yield from take_until(source, STOPS, out.content))
    yield from take_repeats(source, MESSAGE)
    out.mark()
    emit = out.reasoning if header.is_analysis else out.content
    if header.function:
        yield from _take_arguments(source, out, header)
        return (yield from take_until(source, STOPS, emit))
    if header.foreign:
        emit(f"{header.foreign} ")
    if header.channel == "final":
        yield from _take_answer(source, out)
    return (yield from take_until(source, STOPS, emit))


def _take_arguments(
    source: StreamedText, out: DeltaWriter, header: _MessageHeader
) -> Reading[None]:
    """Take the arguments of a call; other text is content."""
    calls = out.calls
    source.keep(header.text)
    yield from take_space(source)
    first = yield from peek_char(source)
    if first == "{":
        complete = yield from stream_arguments(source, out, header.function)
    else:
        complete = not first or bool((yield from peek_any(source, STOPS)))
        if complete:
            out.start(header.function)
            out.arguments(_NO_ARGUMENTS)
            out.end(complete=True)
    left = source.take_kept()
    if out.calls > calls and header.foreign:
        out.content(header.foreign)
        out.mark()
    if not complete:
        out.content(left)


def _take_answer(source: StreamedText, out: DeltaWriter) -> Reading[None]:
    """Take an answer as far as it is a JSON object or list."""
    out.content((yield from take_space(source)))
    if (yield from peek_char(source)) in _JSON_BEGINNINGS:
        yield from take_value(source, out.content, mended=False)


def _take_header(source: StreamedText, prefix: str) -> Reading[_MessageHeader]:
    """Take a header; text that is no header is the message's text."""
    text = marker = prefix
    while marker != MESSAGE:
        marker = yield from peek_any(source, MARKERS)
        piece = marker or (yield from peek_char(source))
        is_invalid = (
            piece in _NOT_IN_HEADERS or marker in ENDS or len(text) > _MAX_HEADER_CHARS
        )
        if is_invalid or not piece:
            cut = not piece and text.startswith((START, CHANNEL))
            return _MessageHeader(text, complete=False, cut=cut)
        text += source.take(len(piece))
    return _MessageHeader(text, complete=True, cut=False)
