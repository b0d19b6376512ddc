"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, one, several or a list.

With both markers there may be text around calls, and between two markers there may be
several objects, or lists of them. With the first marker alone, calls are followed by any
text. Without markers, an answer that begins with an object or a list may also be JSON
that the user requested: so it is a call only if it has the name of a tool of the request,
and arguments. Such calls are separated by `;` or `,`, or by nothing.
"""

from typing import Final

from attrs import frozen

from minfer.effects.text.tools.calls import Accept, is_tool_name, skip_stray, take_calls
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.sections import sections
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    peek_char,
    take_repeats,
    take_space,
)

_CALL_BEGINNINGS: Final = ("{", "[")
_SEPARATORS: Final = (";", ",")  # what models write between calls


@frozen(kw_only=True)
class Objects:
    """A format whose calls are JSON objects."""

    opens: tuple[str, ...] = ()  # markers, any of which begins calls
    closes: str = ""  # the marker that ends them
    bare: bool = False  # an answer may begin with calls, without a marker
    drops: tuple[str, ...] = ()  # markers around an answer

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""
        if self.bare:
            yield from _take_objects(source, out, tools.names.__contains__)
        if not self.opens:
            yield from take_rest(source, out)
            return

        def body(marker: str) -> Reading[bool]:
            yield from take_repeats(source, marker)
            if self.closes:
                return (yield from self._calls_between_markers(source, out))
            yield from _take_objects(
                source, out, is_tool_name, source.take_kept(), bare=True
            )
            source.keep()
            return True

        closes = (self.closes,) if self.closes else ()
        yield from sections(
            source, out, self.opens, body, closes=closes, drops=self.drops
        )

    def _calls_between_markers(
        self, source: StreamedText, out: DeltaWriter
    ) -> Reading[bool]:
        """Take calls up to the closing marker; returns whether there is nothing else."""
        while (yield from take_calls(source, out)):
            source.keep()
            yield from take_space(source)
            if (yield from peek_any(source, [self.closes])):
                source.take(len(self.closes))
                return True
            if not (yield from peek_char(source)):
                return True  # the marker is missing
        return False


def _take_objects(
    source: StreamedText,
    out: DeltaWriter,
    accept: Accept,
    prefix: str = "",
    *,
    bare: bool = False,
) -> Reading[None]:
    """Take calls as long as there are any. Other text, after `prefix`, is content."""
    source.keep(prefix)
    yield from take_space(source)
    while (yield from peek_char(source)) in _CALL_BEGINNINGS:
        complete = yield from take_calls(source, out, accept, bare=bare)
        if not complete:
            break
        yield from skip_stray(source)
        source.keep()
        if (yield from peek_char(source)) in _SEPARATORS:
            source.take(1)
            yield from take_space(source)
    out.content(source.take_kept())


def take_rest(source: StreamedText, out: DeltaWriter) -> Reading[None]:
    """Take the rest of the text as content."""
    while (yield from peek_char(source)):
        out.content(source.take(len(source.text)))
