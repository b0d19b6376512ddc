"""The output of readers.

White space beside markers is layout: formats put line breaks between reasoning, answer
and calls, and clients show what they get. So white space is kept until the text after it
is known. Beside markers it is dropped; parts of one kind with a marker between them
become paragraphs.

Text that was streamed cannot be taken back: there a call that goes wrong is incomplete.
Without streaming, an answer has only complete calls: the text of others becomes content.
"""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, evolve, field

from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merge,
)
from minfer.effects.text.tools.source import SPACE

_PARAGRAPH: Final = "\n\n"


@define
class _Flow:
    """Text of one kind, and its trailing white space."""

    kind: type[ContentDelta] | type[ReasoningDelta]
    started: bool = False  # some text was emitted
    bare: bool = True  # no text since the last marker
    space: list[str] = field(factory=list)  # not emitted yet


class DeltaWriter:
    """Deltas, until they are taken. `new_id` makes the id of each call; with `streaming`,
    a call is emitted while it comes.
    """

    def __init__(self, new_id: Callable[[], str], *, streaming: bool = True) -> None:
        self.calls = 0  # that were emitted
        self._first = 0  # the index in `calls` of this answer's first
        self._running = False  # a call has begun, and has not ended
        self._new_id = new_id
        self.streaming = streaming
        self._name = ""  # of the last call
        self._arguments: list[str] = []  # of it, without streaming
        self._deltas: list[Delta] = []
        self._content = _Flow(ContentDelta)
        self._reasoning = _Flow(ReasoningDelta)
        self._marked = False  # there was reasoning, or a call

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def restart(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Begin the answer here: these `deltas`, the results so far, are in the prompt.
        Returns those of an open call, which belongs to the answer.
        """
        for flow in (self._content, self._reasoning):
            flow.space, flow.started = [], False
        continues = self._running and self.streaming
        self._first = self.calls - continues
        starts = [
            index for index, delta in enumerate(deltas) if isinstance(delta, CallStart)
        ]
        return [_renumber(delta) for delta in deltas[starts[-1] :]] if continues else []

    def close(self) -> None:
        """Emit the white space that was kept for content after it: none comes."""
        flow = self._content
        if not (self._marked and flow.bare):
            self._put(ContentDelta("".join(flow.space)))

    def content(self, text: str) -> None:
        """Add text to the content."""
        self._write(self._content, text)

    def reasoning(self, text: str) -> None:
        """Add text to the reasoning."""
        self._write(self._reasoning, text)

    def mark(self) -> None:
        """Note a marker: what comes is separate from what was."""
        self._marked = True
        for flow in (self._content, self._reasoning):
            flow.bare, flow.space = True, []

    def start(self, name: str) -> None:
        """Begin a call."""
        self._name = name
        self._arguments = []
        self._running = True
        if self.streaming:
            self._start()

    def arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        if self.streaming:
            self._put(Arguments(self._index - 1, text))
        else:
            self._arguments.append(text)

    def end(self, *, complete: bool) -> bool:
        """End the last call; returns whether it was emitted."""
        self._running = False
        if not self.streaming:
            if not complete:
                return False
            self._start()
            self._put(Arguments(self._index - 1, "".join(self._arguments)))
        self._put(CallEnd(self._index - 1, complete))
        return True

    @property
    def _index(self) -> int:
        """The number of emitted calls of this answer."""
        return self.calls - self._first

    def _start(self) -> None:
        self.mark()
        self._put(CallStart(self._index, self._new_id(), self._name))
        self.calls += 1

    def _write(self, flow: _Flow, text: str) -> None:
        body = text.rstrip(SPACE)
        if body:
            lead = "".join(flow.space) + body
            if self._marked and flow.bare:
                lead = _PARAGRAPH * flow.started + lead.lstrip(SPACE)
            self._put(flow.kind(lead))
            flow.started, flow.bare, flow.space = True, False, []
        if len(text) > len(body):
            flow.space.append(text[len(body) :])

    def _put(self, delta: Delta) -> None:
        if not getattr(delta, "text", True):
            return
        if self._deltas and (merged := merge(self._deltas[-1], delta)) is not None:
            self._deltas[-1] = merged
        else:
            self._deltas.append(delta)


def _renumber(delta: Delta) -> Delta:
    """A delta of the answer's first call."""
    match delta:
        case CallStart():
            return evolve(delta, index=0)
        case Arguments():
            return evolve(delta, index=0)
    return delta
