"""What a draft model's cache lacks of its rows, and how it comes by it.

Theory. A draft model takes no part in steps in which nobody drafts: at batches where
speculation does not pay, it would cost time for nothing. But when rows draft again, its
cache lacks what they have drawn meanwhile, and it would guess badly for all the rest. So
the host keeps count of that; before such rows draft, their tokens, as far as results have
told them, are taken as a chunk by the draft model alone. What was drawn in steps that are
in flight comes with the step itself, which brings the token before the last.

Counts are of the most that there can be, as how many drafts stand is known late: some
tokens are taken twice, which changes nothing.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from attrs import define, field, frozen

from minfer.effects.execution.device_rows import Words, aligned
from minfer.effects.execution.inputs import History, layout, views
from minfer.effects.execution.kinds import Kind
from minfer.plan import Plan, Yields

MOST: Final = 1024  # tokens that a step waits for
COVERED: Final = 1  # tokens before the last that a step in which rows draft brings along


@define(eq=False)
class Text:
    """What is known of a row."""

    gen: int  # whose it is
    tokens: list[int]
    there: int  # so many of them are in the draft model's cache
    lacks: int = 0  # before the last one that the device knows, at most


@frozen
class Chunk:
    """Tokens of a row that are taken now."""

    row: int
    start: int
    tokens: list[int]


@define(eq=False)
class CatchUp:
    """The rows of one draft model."""

    budget: int  # tokens of a step
    texts: dict[int, Text] = field(factory=dict)  # by device row

    def begun(self, plan: Plan) -> "tuple[Kind, Words] | None":
        """A plan is launched; returns what is to be done before, as `pack_chunks` does,
        if anything.
        """
        chunks = self.chunks(plan)
        self.launched(plan)
        return pack_chunks(chunks) if chunks else None

    def chunks(self, plan: Plan) -> list[Chunk]:
        """What is to be taken before a plan is, for those who draft in it."""
        found, room = list[Chunk](), min(MOST, self.budget)
        for draft in plan.drafts:
            text = self.texts.get(plan.rows[draft.index])
            if text is None or draft.tokens or text.lacks <= COVERED:
                continue
            tokens = text.tokens[text.there :][:room]
            if tokens:
                found.append(Chunk(plan.rows[draft.index], text.there, tokens))
                room -= len(tokens)
                text.there += len(tokens)
            if text.there == len(text.tokens):
                text.lacks = COVERED
        return found

    def launched(self, plan: Plan) -> None:
        """A plan is on its way."""
        filled = {fill.index for fill in plan.fills}
        said = {draft.index for draft in plan.drafts if draft.tokens}
        drafting = {draft.index for draft in plan.drafts} - said
        for opened in plan.opens:
            at = opened.index
            begin = plan.starts[at]
            text = Text(plan.gens[at], list(opened.known), begin)
            self.texts[plan.rows[at]] = text
        for at, row in enumerate(plan.rows):
            if row not in self.texts:
                continue
            text = self.texts[row]
            if at in filled:
                text.there = max(text.there, plan.starts[at] + plan.counts[at])
            elif not (filled or drafting) or text.lacks > COVERED:
                text.lacks += plan.most[at]
            else:  # it has been brought along
                text.there = len(text.tokens)
                text.lacks = plan.counts[at] - 1 if at in said else int(at in drafting)

    def collected(self, plan: Plan, yields: Yields) -> None:
        """What came of a plan."""
        for row, gen, tokens in zip(plan.rows, plan.gens, yields, strict=True):
            text = self.texts.get(row)
            if text is not None and text.gen == gen:
                text.tokens += tokens

    def forget(self) -> None:
        """A plan failed: whoever goes on is opened anew."""
        self.texts.clear()


def pack_chunks(chunks: list[Chunk]) -> tuple[Kind, Words]:
    """A forward of these alone, in which nobody draws."""
    counts = [len(one.tokens) for one in chunks]
    total = sum(counts)
    kind = Kind(alone=0, draws=0, tokens=total, chunks=len(chunks), longest=max(counts))
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(kind)), np.int32)
    history = History(*views(words, kind)[:3])
    rows = [one.row for one in chunks]
    history.tokens[0] = [token for one in chunks for token in one.tokens]
    history.tokens[1] = [*_positions(chunks)]
    history.tokens[2] = np.repeat(rows, counts)
    offsets = np.cumsum(counts) - counts
    starts = [one.start for one in chunks]
    history.chunks[:] = np.array([rows, starts, counts, offsets], np.int32)
    return kind, words


def _positions(chunks: list[Chunk]) -> Iterator[int]:
    for one in chunks:
        yield from range(one.start, one.start + len(one.tokens))
