"""Calls in Python's notation: `[get_weather(city="Zürich", days=3), now()]`.

Arguments have names. Each is sent once it is complete: it is a value that Python can
write and JSON has, or JSON. Without markers, calls are at the beginning of the answer and
have the names of tools of the request.
"""

import re
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.calls import (
    Accept,
    emit_arguments,
    is_bare_name,
    start_call,
)
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.objects import take_rest
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.python_values import literal_json
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
from minfer.effects.text.tools.tag_values import partial_json, quoted

_NAME: Final = re.compile(r"[\w.-]*")
_KEY: Final = re.compile(r"\w*")
_PLAIN: Final = re.compile(r"[^'\"()\[\]{},]*")  # outside of strings
_OPENERS, _CLOSERS, _QUOTES = "([{", ")]}", "'\""
_STRING_CHARS: Final = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in _QUOTES}
_SEPARATORS: Final = (",", ";")


@frozen(kw_only=True)
class PythonCalls:
    """A format whose calls are Python's."""

    opens: tuple[str, ...] = ()  # markers, any of which begins calls
    closes: tuple[str, ...] = ()  # markers, any of which ends them
    bare: bool = False  # an answer may begin with calls, without a marker

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""
        if self.bare:
            source.keep()
            yield from _calls(source, out, tools.names.__contains__)
            out.content(source.take_settled() + source.take_kept())
        if not self.opens:
            yield from take_rest(source, out)
            return

        def body(marker: str) -> Reading[bool]:
            yield from take_repeats(source, marker)
            if not (yield from _calls(source, out, is_bare_name)):
                return False
            yield from take_space(source)
            if self.closes:
                closes = yield from peek_any(source, self.closes)
                source.take(len(closes))
                return bool(closes) or not (yield from peek_char(source))
            return True

        yield from sections(source, out, self.opens, body, closes=self.closes)


def _calls(source: StreamedText, out: DeltaWriter, accept: Accept) -> Reading[bool]:
    """Take calls, in brackets or not; returns whether all are complete."""
    yield from take_space(source)
    listed = (yield from peek_char(source)) == "["
    source.take(listed)
    while True:
        yield from take_space(source)
        if not (yield from _call(source, out, accept)):
            return False
        yield from take_space(source)
        after = yield from peek_char(source)
        if after in _SEPARATORS and after:
            source.take(1)
        elif after == "]" and listed:
            source.take(1)
            source.keep()
            return True
        elif listed or not after or not _NAME.fullmatch(after):
            return not listed


def _call(source: StreamedText, out: DeltaWriter, accept: Accept) -> Reading[bool]:
    """Take a call, and emit it; returns whether it is complete."""
    name = yield from take_matching(source, _NAME)
    if not name or not accept(name) or (yield from peek_char(source)) != "(":
        return False
    source.take(1)
    yield from take_space(source)
    key = "" if (yield from peek_char(source)) == ")" else (yield from _key(source))
    if key is None:
        return False
    start_call(source, out, name)
    complete = yield from _arguments(source, out, key)
    if out.end(complete=complete) and complete:
        source.keep()
    return complete


def _arguments(source: StreamedText, out: DeltaWriter, key: str | None) -> Reading[bool]:
    """Take arguments, the first of which is `key`, up to the closing parenthesis; returns
    whether they are complete.
    """
    lead = "{"
    while key:
        emit_arguments(source, out, f"{lead}{quoted(key)}: ")
        lead = ", "
        text = yield from _value(source)
        if not (yield from peek_char(source)):
            emit_arguments(source, out, partial_json(text.lstrip(_QUOTES)))
            return False
        if (value := literal_json(text)) is None:
            return False
        emit_arguments(source, out, value)
        if (yield from peek_char(source)) == ",":
            source.take(1)
            yield from take_space(source)
        key = "" if (yield from peek_char(source)) == ")" else (yield from _key(source))
    if key is None:
        return False
    source.take(1)
    emit_arguments(source, out, "{}" if lead == "{" else "}")
    return True


def _key(source: StreamedText) -> Reading[str | None]:
    """Take the name of an argument and `=`; returns the name, or None."""
    key = yield from take_matching(source, _KEY)
    yield from take_space(source)
    if not key or (yield from peek_char(source)) != "=":
        return None
    source.take(1)
    return key


def _value(source: StreamedText) -> Reading[str]:
    """Take a value, up to what follows it, or to the end; returns its text."""
    pieces: list[str] = []
    depth = 0
    while True:
        pieces.append((yield from take_matching(source, _PLAIN)))
        mark = yield from peek_char(source)
        if not mark or (depth == 0 and mark in (",", *_CLOSERS)):
            return "".join(pieces).strip()
        source.take(1)
        pieces.append(mark)
        depth += (mark in _OPENERS) - (mark in _CLOSERS)
        if mark in _QUOTES:
            pieces.append((yield from _string(source, mark)))


def _string(source: StreamedText, quote: str) -> Reading[str]:
    """Take the rest of a string; line breaks in it become escapes."""
    if (yield from peek_any(source, [quote * 2])):
        source.take(2)
        pieces = [quote * 2]
        end = quote * 3
    else:
        pieces, end = [], quote
    while True:
        pieces.append((yield from take_matching(source, _STRING_CHARS[quote])))
        mark = yield from peek_char(source)
        if not mark:
            return "".join(pieces)
        if (yield from peek_any(source, [end])):
            pieces.append(source.take(len(end)))
            return "".join(pieces)
        source.take(1)
        if mark == "\\":
            pieces.append(mark)
            mark = yield from peek_char(source)
            source.take(1)
        pieces.append("\\n" if mark == "\n" and len(end) == 1 else mark)
