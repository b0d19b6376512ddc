"""Mistral's calls, in the formats of its various tokenizers.

[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name{...}
[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}
"""

import re
from typing import Final

from minfer.effects.text.tools.calls import any_name, behind, calls, stream_arguments
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

CALLS: Final = "[TOOL_CALLS]"
ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
_NAME: Final = re.compile(r"[\w.:/-]*")


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:  # noqa: ARG001 - of all readers
    """Read a whole answer."""
    marker = ""
    while marker := marker or (yield from until(source, [CALLS], out.content)):
        source.keep(marker)
        before = out.calls
        yield from repeats(source, CALLS)
        listed = (yield from char(source)) in ("[", "{")
        whole = yield from (calls(source, out) if listed else _named(source, out))
        left = source.kept()
        marker = ""
        if out.calls > before:
            marker = yield from behind(source, out, left, [CALLS])
        elif not whole:
            out.content(left)


def _named(source: Source, out: DeltaWriter) -> Reading[bool]:
    """Take a name and arguments; returns whether they are complete."""
    name = yield from run(source, _NAME)
    if (yield from ahead(source, [ID])):
        source.take(len(ID))
        yield from run(source, _NAME)  # the answer's calls get ids of their own
    if (yield from ahead(source, [ARGUMENTS])):
        source.take(len(ARGUMENTS))
    yield from space(source)
    if not name or not any_name(name) or (yield from char(source)) != "{":
        return False
    return (yield from stream_arguments(source, out, name))
