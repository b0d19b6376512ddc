"""Which tokens a draft model's cache lacks, and how it computes them.

Theory. A draft model does not run in steps without drafts, nor for prompts: at batch
sizes where speculation does not pay, either would cost time for nothing (a 0.5B beside a
7B takes an eighth of the prompt's time). So the host counts what the draft model's cache
lacks of each row. Before rows get drafts, the draft model alone computes their missing
tokens as a chunk, as far as results have reported them. Tokens of steps in flight are
computed by the drafting step itself, which takes the token before the last, too.

Rows share blocks, so the host tracks by block which of them are complete in the draft
model's cache. A row that opens with a prefix that another row has drafted behind lacks
nothing of it; other prefixes are computed when a row first needs drafts behind them.

Counts are upper bounds, as the number of accepted drafts is known late: some tokens are
computed twice, which changes nothing.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

import numpy as np
from attrs import define, field, frozen

from minfer.effects.execution.device.device_rows import Words, aligned
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import History, layout, views
from minfer.records.plan import Plan, Yields

COVERED: Final = 1  # tokens before the last that a drafting step computes, too


@define(eq=False)
class Text:
    """The known tokens and the cache state of a row."""

    gen: int  # generation of the owner
    tokens: list[int]
    table: list[int]  # its blocks
    there: int  # tokens of it in the draft model's cache
    lacks: int  # missing tokens before the last one on the device, at most


@frozen
class Chunk:
    """Tokens of a row that are computed now."""

    row: int
    start: int
    tokens: list[int]


@define(eq=False)
class CatchUp:
    """Tracks the rows of one draft model."""

    budget: int  # tokens of a forward
    block_size: int
    texts: dict[int, Text] = field(factory=dict)  # by device row
    whole: set[int] = field(factory=set)  # blocks that are complete

    def begun(self, plan: Plan) -> list[tuple[StepShape, Words]]:
        """Note a launched plan; returns the forwards to run before it, as `pack_chunks`
        does.
        """
        self.handed_over(plan)
        chunks = self.chunks(plan)
        self.launched(plan)
        return [pack_chunks(part) for part in parted(chunks, self.budget)]

    def handed_over(self, plan: Plan) -> None:
        """Note the new owners of rows and blocks."""
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
        """Returns the chunks to compute before a plan, for the rows that draft in it.
        They are complete: drafts after an incomplete context are poor, and the row's
        acceptance rate would count them.
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
        """Note what the caches hold after a plan."""
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
            else:  # the step computed it, too
                self._has(text, len(text.tokens))
                text.lacks = plan.counts[at] - 1 if at in said else int(at in drafting)

    def _has(self, text: Text, upto: int) -> None:
        """Note that the draft model's cache has so many tokens of a row."""
        begin = text.there // self.block_size
        text.there = upto
        self.whole.update(text.table[begin : upto // self.block_size])

    def collected(self, plan: Plan, yields: Yields) -> None:
        """Note a plan's results."""
        for row, gen, tokens in zip(plan.rows, plan.gens, yields, strict=True):
            text = self.texts.get(row)
            if text is not None and text.gen == gen:
                text.tokens += tokens

    def forget(self) -> None:
        """Clear all after a failed plan: rows that continue are opened again."""
        self.texts.clear()
        self.whole.clear()


def parted(chunks: list[Chunk], budget: int) -> Iterator[list[Chunk]]:
    """Yields chunks in order, in parts of up to `budget` tokens."""
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
    """Returns a forward of these chunks alone, which samples nothing."""
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
