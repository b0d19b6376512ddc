"""Reasoning between two markers, before the answer: `<think>...</think>`.

Some templates open it already, so that the answer begins within; and some models open it
once more then. Where the opening marker is not at the beginning, it is text.
"""

from typing import Final

from attrs import frozen

from minfer.effects.text.tools.outlet import Outlet
from minfer.effects.text.tools.source import Reading, Source, ahead, space, until


@frozen
class Thinking:
    """The markers of a family of models."""

    opens: str
    closes: str

    def read(self, source: Source, out: Outlet, *, opened: bool) -> Reading[None]:
        """Take the reasoning, if there is any; the answer comes behind it."""
        source.keep()
        yield from space(source)
        if (yield from ahead(source, [self.opens])):
            source.take(len(self.opens))
        elif not opened:
            out.content(source.kept())
            return
        source.kept()
        out.mark()
        yield from until(source, [self.closes], out.reasoning)

    def open_at_end(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        return prompt.rstrip().endswith(self.opens)


THINK: Final = Thinking("<think>", "</think>")
BRACKETS: Final = Thinking("[THINK]", "[/THINK]")  # Mistral's
