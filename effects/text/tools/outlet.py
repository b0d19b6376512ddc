"""Where readers put what they find.

White space beside markers is layout: formats put lines between reasoning, answer and
calls, and clients show what they get. So white space is held until it is known what comes
behind it. Beside markers it is left out; parts of one kind that a marker was between are
paragraphs.
"""

from collections.abc import Callable
from typing import Final

from attrs import define, field

from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Delta,
    Reasoning,
    merged,
)
from minfer.effects.text.tools.source import SPACE

_PARAGRAPH: Final = "\n\n"


@define
class _Flow:
    """Text of one kind, and the white space that came last."""

    kind: type[Content] | type[Reasoning]
    said: bool = False  # something was
    bare: bool = True  # nothing was since the last marker
    space: list[str] = field(factory=list)  # held


class Outlet:
    """Deltas, until they are taken. `new_id` names each call that begins."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.calls = 0  # that began
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._content = _Flow(Content)
        self._reasoning = _Flow(Reasoning)
        self._marked = False  # there was reasoning, or a call

    def take(self) -> list[Delta]:
        """What was found since the last time."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def close(self) -> None:
        """Let go of what was held for what comes behind it: nothing does."""
        flow = self._content
        if not (self._marked and flow.bare):
            self._put(Content("".join(flow.space)))

    def content(self, text: str) -> None:
        """Text is for whoever asked."""
        self._flows(self._content, text)

    def reasoning(self, text: str) -> None:
        """Text is the model's reasoning."""
        self._flows(self._reasoning, text)

    def mark(self) -> None:
        """There was a marker: what comes stands apart from what was."""
        self._marked = True
        for flow in (self._content, self._reasoning):
            flow.bare, flow.space = True, []

    def start(self, name: str) -> None:
        """A call begins."""
        self.mark()
        self._put(CallStart(self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        self._put(Arguments(self.calls - 1, text))

    def end(self, *, whole: bool) -> None:
        """The call that began last is over."""
        self._put(CallEnd(self.calls - 1, whole))

    def _flows(self, flow: _Flow, text: str) -> None:
        body = text.rstrip(SPACE)
        if body:
            lead = "".join(flow.space) + body
            if self._marked and flow.bare:
                lead = _PARAGRAPH * flow.said + lead.lstrip(SPACE)
            self._put(flow.kind(lead))
            flow.said, flow.bare, flow.space = True, False, []
        if len(text) > len(body):
            flow.space.append(text[len(body) :])

    def _put(self, delta: Delta) -> None:
        if not getattr(delta, "text", True):
            return
        if self._deltas and (one := merged(self._deltas[-1], delta)) is not None:
            self._deltas[-1] = one
        else:
            self._deltas.append(delta)
