"""The parser of one answer, while it comes."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.deltas import CallStart, Delta
from minfer.effects.text.tools.format import ToolFormat
from minfer.effects.text.tools.objects import take_rest
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.source import Reading, StreamedText, take_until
from minfer.effects.text.tools.thinking import Thinking

_MAX_TRIED_MARKERS: Final = (
    16  # markers within reasoning, each of which might begin a call
)
_MAX_TRIED_CHARS: Final = 1 << 18  # after all of them; the first is always tried
Reader = Callable[[StreamedText, DeltaWriter, OfferedTools], Reading[None]]


class Parser:
    """Separates content, reasoning and calls; see `ToolFormat` and `Thinking`.

    Without a format all that is no reasoning is content. `offered` are the tools that
    may be called; `opened` means that the answer begins within reasoning; `streaming`,
    that the consumer gets calls before they are whole.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        offered: OfferedTools | None = None,
        thinking: Thinking | None = None,
        *,
        opened: bool = False,
        streaming: bool = True,
    ) -> None:
        self._source = StreamedText()
        self._out = DeltaWriter(tools.new_id if tools else str, streaming=streaming)
        self._reading = self._read(tools, offered or OfferedTools(), thinking, opened)
        self._finished = False
        self._prefix_deltas: list[Delta] = []

    def begin(self, text: str) -> None:
        """Read the part of the answer that is in the prompt: none of it is emitted but a
        call in which it ends.
        """
        self._prefix_deltas = self._out.restart(self.push(text))

    def push(self, text: str, *, final: bool = False) -> list[Delta]:
        """Add text; return the deltas that are certain by now, with `final` all."""
        if not self._finished:
            self._source.push(text, final=final)
            self._finished = next(self._reading, self) is self
        prefix_deltas, self._prefix_deltas = self._prefix_deltas, []
        return [*prefix_deltas, *self._out.take()]

    def _read(
        self,
        tools: ToolFormat | None,
        offered: OfferedTools,
        thinking: Thinking | None,
        opened: bool,
    ) -> Reading[None]:
        drops = thinking.around if thinking is not None else ()
        read = partial(_content, drops) if tools is None else tools.dialect.read
        opens = tools.opens if tools is not None else ()
        if thinking is not None:
            unclosed = yield from thinking.read(
                self._source, self._out, opened=opened, calls=opens
            )
            index = self._call_within(
                unclosed, opens, partial(self._begins_call, read, offered)
            )
            self._out.reasoning(unclosed[:index])
            self._source.put_back(unclosed[index:])
        yield from read(self._source, self._out, offered)
        self._out.close()

    def _call_within(
        self, text: str, opens: Sequence[str], begins: Callable[..., bool]
    ) -> int:
        """The index of the first whole call in a text, as without streaming; while
        streaming, of the first that begins, if none is whole.
        """
        for streaming in (False, True) if self._out.streaming else (False,):
            index = _first_call(text, opens, partial(begins, streaming=streaming))
            if index < len(text):
                return index
        return len(text)

    def _begins_call(
        self, read: Reader, offered: OfferedTools, text: str, *, streaming: bool
    ) -> bool:
        """Whether the end of an answer begins with a call."""
        source, out = StreamedText(), DeltaWriter(str, streaming=streaming)
        source.push(text, final=True)
        for _ in read(source, out, offered):
            raise AssertionError("there is no more text to wait for")
        return isinstance(next(iter(out.take()), None), CallStart)


def _first_call(text: str, opens: Sequence[str], begins: Callable[[str], bool]) -> int:
    """The index of the first call in a text: of a marker, or of the text's end if there
    is none.
    """
    marks = re.finditer("|".join(map(re.escape, opens)), text) if text else ()
    tried = 0
    for mark in islice(marks, _MAX_TRIED_MARKERS):
        if tried > _MAX_TRIED_CHARS:
            break
        if begins(text[mark.start() :]):
            return mark.start()
        tried += len(text) - mark.start()
    return len(text)


def _content(
    drops: Sequence[str], source: StreamedText, out: DeltaWriter, _: OfferedTools
) -> Reading[None]:
    """Read an answer without calls, and without the markers of `drops`."""
    while drops and (yield from take_until(source, drops, out.content)):
        out.mark()
    yield from take_rest(source, out)
