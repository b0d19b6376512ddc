"""Llama 3's calls: `<|python_tag|>{"name": ..., "parameters": ...}`, or without the tag.

Without the tag a call is at the beginning, and has the name of a tool of the request; the
tag may be anywhere. Several calls are separated by `;`.
"""

from typing import Final

from minfer.effects.text.tools.bare import several
from minfer.effects.text.tools.calls import any_name
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import Offered
from minfer.effects.text.tools.source import Reading, Source, repeats, until

TAG: Final = "<|python_tag|>"


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:
    """Read a whole answer."""
    yield from several(source, out, tools.names.__contains__)
    while tag := (yield from until(source, [TAG], out.content)):
        tag += yield from repeats(source, TAG)
        yield from several(source, out, any_name, tag, bare=True)
