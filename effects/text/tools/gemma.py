"""Calls of Gemma: `<|tool_call>call:NAME{city:<|"|>Zürich<|"|>,days:3}<tool_call|>`.

Arguments are like JSON, but strings are between markers of their own, and keys are bare.
They are sent as they come.
"""

import re
from functools import partial
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.calls import (
    emit_arguments,
    is_bare_name,
    skip_stray,
    start_call,
    take_value,
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
    take_until,
)
from minfer.effects.text.tools.tag_values import json_of, partial_json, quoted

_CALL: Final = "call:"
_NAME: Final = re.compile(r"[\w.:/-]*")
_KEY: Final = re.compile(r"[^:{}\[\],<\"]*")
_WORD: Final = re.compile(r"[^,{}\[\]<\"]*")
_MAX_DEPTH: Final = 64  # levels of objects and lists


@frozen(kw_only=True)
class GemmaCalls:
    """A format whose calls are Gemma's."""

    call: str
    ends: str
    quote: str  # the marker around strings

    @property
    def opens(self) -> tuple[str, ...]:
        """The marker that begins a call."""
        return (self.call,)

    def read(
        self,
        source: StreamedText,
        out: DeltaWriter,
        tools: OfferedTools,  # noqa: ARG002 - of all readers
    ) -> Reading[None]:
        """Read a whole answer."""

        def body(marker: str) -> Reading[bool]:
            yield from take_repeats(source, marker)
            return (yield from self._call(source, out))

        yield from sections(source, out, self.opens, body, closes=(self.ends,))

    def _call(self, source: StreamedText, out: DeltaWriter) -> Reading[bool]:
        """Take a call, up to its end; returns whether there is nothing else."""
        if not (yield from peek_any(source, [_CALL])):
            return False
        source.take(len(_CALL))
        name = yield from take_matching(source, _NAME)
        if not name or not is_bare_name(name) or (yield from peek_char(source)) != "{":
            return False
        source.take(1)
        start_call(source, out, name)
        complete = yield from self._object(source, out, _MAX_DEPTH)
        if not out.end(complete=complete) or not complete:
            return False
        source.keep()
        yield from skip_stray(source)
        if (yield from peek_any(source, [self.ends])):
            source.take(len(self.ends))
            return True
        return not (yield from peek_char(source))

    def _object(
        self, source: StreamedText, out: DeltaWriter, levels: int
    ) -> Reading[bool]:
        """Take the rest of an object; returns whether it is complete."""
        emit_arguments(source, out, "{")
        first = True
        while not (yield from self._closes(source, out, "}")):
            if not first and not (yield from self._comma(source, out)):
                return False
            first = False
            key = yield from self._key(source)
            if key is None or (yield from peek_char(source)) != ":":
                return False
            source.take(1)
            emit_arguments(source, out, f"{quoted(key)}: ")
            if not (yield from self._value(source, out, levels)):
                return False
        return True

    def _list(self, source: StreamedText, out: DeltaWriter, levels: int) -> Reading[bool]:
        """Take the rest of a list; returns whether it is complete."""
        emit_arguments(source, out, "[")
        first = True
        while not (yield from self._closes(source, out, "]")):
            if not first and not (yield from self._comma(source, out)):
                return False
            first = False
            if not (yield from self._value(source, out, levels)):
                return False
        return True

    def _closes(self, source: StreamedText, out: DeltaWriter, end: str) -> Reading[bool]:
        """Take the end of an object or list, if it comes next."""
        yield from take_space(source)
        if (yield from peek_char(source)) != end:
            return False
        source.take(1)
        emit_arguments(source, out, end)
        return True

    def _comma(self, source: StreamedText, out: DeltaWriter) -> Reading[bool]:
        if (yield from peek_char(source)) != ",":
            return False
        source.take(1)
        yield from take_space(source)
        emit_arguments(source, out, ", ")
        return True

    def _key(self, source: StreamedText) -> Reading[str | None]:
        """Take the name of a value, bare or in quotes."""
        if (yield from peek_any(source, [self.quote])):
            source.take(len(self.quote))
            key = yield from take_matching(source, _KEY)
            end_quote = yield from peek_any(source, [self.quote])
            source.take(len(end_quote))
            return key if end_quote else None
        quote = '"' if (yield from peek_char(source)) == '"' else ""
        source.take(len(quote))
        key = yield from take_matching(source, _KEY)
        if quote and (yield from peek_char(source)) == quote:
            source.take(1)
        return key.strip() or None

    def _value(
        self, source: StreamedText, out: DeltaWriter, levels: int
    ) -> Reading[bool]:
        """Take a value, and emit it as JSON; returns whether it is complete."""
        yield from take_space(source)
        if (yield from peek_any(source, [self.quote])):
            source.take(len(self.quote))
            emit_arguments(source, out, '"')
            end = yield from take_until(
                source,
                [self.quote],
                lambda text: emit_arguments(source, out, quoted(text)[1:-1]),
            )
            emit_arguments(source, out, '"' if end else "")
            return bool(end)
        match (yield from peek_char(source)):
            case '"':
                return (
                    yield from take_value(source, partial(emit_arguments, source, out))
                )
            case "{" if levels:
                source.take(1)
                return (yield from self._object(source, out, levels - 1))
            case "[" if levels:
                source.take(1)
                return (yield from self._list(source, out, levels - 1))
        word = yield from take_matching(source, _WORD)
        if not (yield from peek_char(source)):
            emit_arguments(source, out, partial_json(word))
            return False
        if not word.strip():
            return False
        emit_arguments(source, out, json_of(word))
        return True
