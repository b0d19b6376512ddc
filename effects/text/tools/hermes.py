"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., ...}</tool_call>`.

There may be text around them, and several; between two markers there may be several
objects, too.
"""

from typing import Final

from minfer.effects.text.tools.calls import behind, calls
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

OPENS: Final = "<tool_call>"
CLOSES: Final = "</tool_call>"


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:  # noqa: ARG001 - of all readers
    """Read a whole answer."""
    marker = ""
    markers = [OPENS]
    while marker := marker or (yield from until(source, markers, out.content)):
        if marker == CLOSES:  # again, after a call
            marker = ""
            continue
        source.keep(marker)
        before = out.calls
        whole = yield from _between(source, out)
        left = source.kept()
        marker = ""
        markers = [OPENS, CLOSES] if out.calls > before else [OPENS]
        if not whole and out.calls > before:
            marker = yield from behind(source, out, left, [OPENS, CLOSES])
            marker = marker.removeprefix(CLOSES)
        elif not whole:
            out.content(left)


def _between(source: Source, out: DeltaWriter) -> Reading[bool]:
    """Take calls up to the closing marker; returns whether there is nothing else."""
    yield from repeats(source, OPENS)
    while (yield from calls(source, out)):
        source.keep()
        yield from space(source)
        if (yield from ahead(source, [CLOSES])):
            source.take(len(CLOSES))
            return True
        if not (yield from char(source)):
            return True  # the marker is missing
    return False
