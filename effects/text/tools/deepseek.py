"""Calls as DeepSeek's models write them, between tokens of their own.

    V3, R1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
            ```json
            {...}
            ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}
            <｜tool▁call▁end｜><｜tool▁calls▁end｜>

Both are read wherever they come: the text before the arguments distinguishes them.
"""

import re
from typing import Final

from minfer.effects.text.tools.calls import any_name, behind, skip_stray, stream_arguments
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import Offered
from minfer.effects.text.tools.source import (
    Reading,
    Source,
    ahead,
    char,
    repeats,
    run,
    space,
    until,
)

CALLS: Final = "<｜tool▁calls▁begin｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
BETWEEN: Final = "<｜tool▁sep｜>"
CALL_ENDS: Final = "<｜tool▁call▁end｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
MARKERS: Final = (CALLS, CALL, BETWEEN, CALL_ENDS, CALLS_END)
_NAME: Final = re.compile(r"[\w.:/-]*")
_FENCE: Final = re.compile("`*")
_LANGUAGE: Final = "json"


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:  # noqa: ARG001 - of all readers
    """Read a whole answer."""
    marker = ""
    markers = [CALLS, CALL]
    while marker := marker or (yield from until(source, markers, out.content)):
        if marker in (CALL_ENDS, CALLS_END):  # once more, behind a call
            marker = ""
            continue
        source.keep(marker)
        before = out.calls
        whole = yield from _calls(source, out, marker)
        left = source.kept()
        marker = ""
        ends = (CALL_ENDS, CALLS_END) if out.calls > before else ()
        markers = [CALLS, CALL, *ends]
        if not whole and out.calls > before:
            marker = yield from behind(source, out, left, MARKERS)
            while marker not in (CALLS, CALL, CALLS_END, ""):
                marker = yield from behind(source, out, "", MARKERS)
            marker = marker.removeprefix(CALLS_END)
        elif not whole:
            out.content(left)


def _calls(source: Source, out: DeltaWriter, marker: str) -> Reading[bool]:
    """Take calls up to their common end; returns whether there is nothing else."""
    if marker == CALLS:
        yield from repeats(source, CALLS)
        if not (yield from ahead(source, [CALL])):
            return False
        source.take(len(CALL))
    while (yield from _call(source, out)):
        source.keep()
        yield from space(source)
        after = yield from ahead(source, [CALL, CALLS_END])
        source.take(len(after))
        if after != CALL:
            return after == CALLS_END or not (yield from char(source))
    return False


def _call(source: Source, out: DeltaWriter) -> Reading[bool]:
    """Take one call, up to its end; returns whether it is complete."""
    yield from repeats(source, CALL)
    kind = yield from run(source, _NAME)
    if not (yield from ahead(source, [BETWEEN])):
        return False
    source.take(len(BETWEEN))
    yield from repeats(source, BETWEEN)
    name = (yield from run(source, _NAME)) or kind
    yield from space(source)
    if (yield from run(source, _FENCE)) and (yield from ahead(source, [_LANGUAGE])):
        source.take(len(_LANGUAGE))
    yield from space(source)
    if not name or not any_name(name) or (yield from char(source)) != "{":
        return False
    whole = yield from stream_arguments(source, out, name)
    if whole:
        yield from skip_stray(source)
    yield from space(source)
    yield from run(source, _FENCE)
    yield from space(source)
    if (yield from ahead(source, [CALL_ENDS])):
        source.take(len(CALL_ENDS))
        return whole
    return whole and not (yield from char(source))
