"""Reasoning between two markers, before the answer: `<think>...</think>`.

Some templates open it already, so that the answer begins within; and some models open it
again then. An opening marker that is not at the beginning is text. A call within
reasoning does not count, unless nothing closes the reasoning: that shows at the end, and
reasoning from its marker on is kept until then.
"""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.source import Reading, Source, ahead, space, until


@frozen
class Thinking:
    """The reasoning markers of a family of models."""

    opens: str
    closes: str

    def read(
        self, source: Source, out: DeltaWriter, *, opened: bool, calls: Sequence[str] = ()
    ) -> Reading[str]:
        """Take the reasoning, if there is any; the answer comes after it. Returns the
        text from a marker of `calls` within reasoning that nothing closed.
        """
        source.keep()
        yield from space(source)
        if (yield from ahead(source, [self.opens])):
            source.take(len(self.opens))
        elif not opened:
            out.content(source.kept())
            return ""
        source.kept()
        out.mark()
        marker = yield from until(source, [self.closes, *calls], out.reasoning)
        if marker not in calls:
            return ""
        held = [marker]
        closes = yield from until(source, [self.closes], held.append)
        if closes:
            out.reasoning("".join(held))
        return "" if closes else "".join(held)

    def open_at_end(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        return prompt.rstrip().endswith(self.opens)


THINK: Final = Thinking("<think>", "</think>")
BRACKETS: Final = Thinking("[THINK]", "[/THINK]")  # Mistral's
