"""Calls without markers: an answer that begins with an object, or a list of objects.

Such an answer may also be JSON that the user requested. So it is a call only if it has
the name of a tool of the request, and arguments.
"""

from typing import Final

from minfer.effects.text.tools.calls import Accept, calls, skip_stray
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import Offered
from minfer.effects.text.tools.source import Reading, Source, char, space

_BEGIN: Final = ("{", "[")
_BETWEEN: Final = (";", ",")  # what models write between calls


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:
    """Read a whole answer."""
    yield from several(source, out, tools.names.__contains__)
    yield from rest(source, out)


def several(
    source: Source,
    out: DeltaWriter,
    accept: Accept,
    begun: str = "",
    *,
    bare: bool = False,
) -> Reading[None]:
    """Take calls as long as there are any. Other text, after `begun`, is content."""
    source.keep(begun)
    yield from space(source)
    while (yield from char(source)) in _BEGIN:
        whole = yield from calls(source, out, accept, bare=bare)
        if not whole:
            break
        yield from skip_stray(source)
        source.keep()
        if (yield from char(source)) in _BETWEEN:
            source.take(1)
            yield from space(source)
    out.content(source.kept())


def rest(source: Source, out: DeltaWriter) -> Reading[None]:
    """Take the rest of the text as content."""
    while (yield from char(source)):
        out.content(source.take(len(source.text)))
