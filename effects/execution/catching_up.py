"""What a draft model's cache lacks of its rows, and how it comes by it.

Theory. A draft model takes part in no step in which nobody drafts, nor in prompts: at
batches where speculation does not pay, either would cost time for nothing (a 0.5B beside
a 7B takes an eighth of the time that a prompt takes). So the host keeps count of what its
cache lacks of each row; before rows draft, their tokens, as far as results have told
them, are taken as a chunk by the draft model alone. What was drawn in steps that are in
flight comes with the step itself, which brings the token before the last.

Rows share blocks, so which of them are whole in the draft model's cache is known by
block: who opens with a prefix that somebody drafted behind lacks nothing of it, and what
nobody drafted behind is taken once somebody does.

Counts are of the most that there can be, as how many drafts stand is known late: some
tokens are taken twice, which changes nothing.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

import numpy as np
from attrs import define, field, frozen

from minfer.effects.execution.device_rows import Words, aligned
from minfer.effects.execution.inputs import History, layout, views
from minfer.effects.execution.step_shape import StepShape
from minfer.plan import Plan, Yields

COVERED: Final = 1  # tokens before the last that a step in which rows draft brings along


@define(eq=False)
class Text:
    """What is known of a row."""

    gen: int  # whose it is
    tokens: list[int]
    table: list[int]  # its blocks
    there: int  # so many of them are in the draft model's cache
    lacks: int  # before the last one that the device knows, at most


@frozen
class Chunk:
    """Tokens of a row that are taken now."""

    row: int
    start: int
    tokens: list[int]


@define(eq=False)
class CatchUp:
    """The rows of one draft model."""

    budget: int  # tokens of a forward
    block_size: int
    texts: dict[int, Text] = field(factory=dict)  # by device row
    whole: set[int] = field(factory=set)  # blocks that lack nothing

    def begun(self, plan: Plan) -> list[tuple[StepShape, Words]]:
        """A plan is launched; returns the forwards that come before, as `pack_chunks`
        does.
        """
        self.handed_over(plan)
        chunks = self.chunks(plan)
        self.launched(plan)
        return [pack_chunks(part) for part in parted(chunks, self.budget)]

    def handed_over(self, plan: Plan) -> None:
        """Rows and blocks have new owners."""
        for opened in plan.opens:
            at, (table,) = opened.index, opened.tables  # layers are of one group here
            start = plan.starts[at]
            shared = start // self.block_size
            self.whole.difference_update(table[shared:])
            found = takewhile(self.whole.__contains__, table[:shared])
            there = self.block_size * sum(1 for _ in found)
            known = [*opened.known]
            text = Text(plan.gens[at], known, [*table], there, start - there)
            self.texts[plan.rows[at]] = text
        for grow in plan.grows:
            self.whole.difference_update(grow.blocks)
            if grow.row in self.texts:
                self.texts[grow.row].table[grow.at :] = grow.blocks

    def chunks(self, plan: Plan) -> list[Chunk]:
        """What is to be taken before a plan is, for those who draft in it. All of it:
        who drafts behind a part guesses badly, and would be thought to do so ever after.
        """
        found = list[Chunk]()
        for draft in plan.drafts:
            row = plan.rows[draft.index]
            text = self.texts.get(row)
            if text is None or draft.tokens or text.lacks <= COVERED:
                continue
            if tokens := text.tokens[text.there :]:
                found.append(Chunk(row, text.there, tokens))
                self._has(text, len(text.tokens))
            text.lacks = COVERED
        return found

    def launched(self, plan: Plan) -> None:
        """A plan is on its way."""
        filled = {fill.index for fill in plan.fills}
        said = {draft.index for draft in plan.drafts if draft.tokens}
        drafting = {draft.index for draft in plan.drafts} - said
        for at, row in enumerate(plan.rows):
            if row not in self.texts:
                continue
            text = self.texts[row]
            if at in filled:
                end = plan.starts[at] + plan.counts[at]
                text.lacks = end + max(0, plan.most[at] - 1) - text.there
            elif not drafting or text.lacks > COVERED:
                text.lacks += plan.most[at]
            else:  # it has been brought along
                self._has(text, len(text.tokens))
                text.lacks = plan.counts[at] - 1 if at in said else int(at in drafting)

    def _has(self, text: Text, upto: int) -> None:
        """The draft model's cache has so many tokens of a row."""
        begin = text.there // self.block_size
        text.there = upto
        self.whole.update(text.table[begin : upto // self.block_size])

    def collected(self, plan: Plan, yields: Yields) -> None:
        """What came of a plan."""
        for row, gen, tokens in zip(plan.rows, plan.gens, yields, strict=True):
            text = self.texts.get(row)
            if text is not None and text.gen == gen:
                text.tokens += tokens

    def forget(self) -> None:
        """A plan failed: whoever goes on is opened anew."""
        self.texts.clear()
        self.whole.clear()


def parted(chunks: list[Chunk], budget: int) -> Iterator[list[Chunk]]:
    """Chunks as they follow each other, in parts of up to `budget` tokens."""
    part, room = list[Chunk](), budget
    for chunk in chunks:
        done = 0
        while done < len(chunk.tokens):
            tokens = chunk.tokens[done : done + room]
            part.append(Chunk(chunk.row, chunk.start + done, tokens))
            done += len(tokens)
            room -= len(tokens)
            if not room:
                yield part
                part, room = [], budget
    if part:
        yield part


def pack_chunks(chunks: list[Chunk]) -> tuple[StepShape, Words]:
    """A forward of these alone, in which nobody draws."""
    counts = [len(one.tokens) for one in chunks]
    total = sum(counts)
    shape = StepShape(
        decode_rows=0, draws=0, tokens=total, chunks=len(chunks), longest=max(counts)
    )
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(shape)), np.int32)
    history = History(*views(words, shape)[:3])
    rows = [one.row for one in chunks]
    history.tokens[0] = [token for one in chunks for token in one.tokens]
    history.tokens[1] = [*_positions(chunks)]
    history.tokens[2] = np.repeat(rows, counts)
    offsets = np.cumsum(counts) - counts
    starts = [one.start for one in chunks]
    history.chunks[:] = np.array([rows, starts, counts, offsets], np.int32)
    return shape, words


def _positions(chunks: list[Chunk]) -> Iterator[int]:
    for one in chunks:
        yield from range(one.start, one.start + len(one.tokens))
