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
from minfer.effects.execution.packing.inputs import PrefillWords, layout, views
from minfer.records.plan import Plan, Yields

COVERED_TOKENS: Final = 1  # tokens before the last that a drafting step computes, too


@define(eq=False)
class DraftedRow:
    """The known tokens and the cache state of a row."""

    gen: int  # generation of the owner
    tokens: list[int]
    table: list[int]  # its blocks
    cached: int  # tokens of it in the draft model's cache
    missing: int  # missing tokens before the last one on the device, at most


@frozen
class MissingChunk:
    """Tokens of a row that are computed now."""

    row: int
    start: int
    tokens: list[int]


@define(eq=False)
class CatchUp:
    """Tracks the rows of one draft model."""

    budget: int  # tokens of a forward
    block_size: int
    states: dict[int, DraftedRow] = field(factory=dict)  # by device row
    complete: set[int] = field(factory=set)  # blocks that are complete

    def start(self, plan: Plan) -> list[tuple[StepShape, Words]]:
        """Note a launched plan; returns the forwards to run before it, as `pack_chunks`
        does.
        """
        self.note_owners(plan)
        chunks = self.missing_chunks(plan)
        self.note_launched(plan)
        return [pack_chunks(batch) for batch in split_by_budget(chunks, self.budget)]

    def note_owners(self, plan: Plan) -> None:
        """Note the new owners of rows and blocks."""
        for opened in plan.opens:
            # Layers with attention are of one group here; a state may come behind it.
            index, table = opened.index, opened.tables[0]
            start = plan.starts[index]
            shared = start // self.block_size
            self.complete.difference_update(table[shared:])
            complete_blocks = takewhile(self.complete.__contains__, table[:shared])
            cached = self.block_size * sum(1 for _ in complete_blocks)
            known = [*opened.known]
            state = DraftedRow(
                plan.run_ids[index], known, [*table], cached, start - cached
            )
            self.states[plan.rows[index]] = state
        for grow in plan.grows:
            self.complete.difference_update(grow.blocks)
            if grow.row in self.states:
                self.states[grow.row].table[grow.at :] = grow.blocks

    def missing_chunks(self, plan: Plan) -> list[MissingChunk]:
        """Returns the chunks to compute before a plan, for the rows that draft in it.
        They are complete: drafts after an incomplete context are poor, and the row's
        acceptance rate would count them.
        """
        chunks = list[MissingChunk]()
        for draft in plan.drafts:
            row = plan.rows[draft.index]
            state = self.states.get(row)
            if state is None or draft.tokens or state.missing <= COVERED_TOKENS:
                continue
            if tokens := state.tokens[state.cached :]:
                chunks.append(MissingChunk(row, state.cached, tokens))
                self._note_cached(state, len(state.tokens))
            state.missing = COVERED_TOKENS
        return chunks

    def note_launched(self, plan: Plan) -> None:
        """Note what the caches hold after a plan."""
        filled = {fill.index for fill in plan.fills}
        from_host = {draft.index for draft in plan.drafts if draft.tokens}
        drafting = {draft.index for draft in plan.drafts} - from_host
        for index, row in enumerate(plan.rows):
            if row not in self.states:
                continue
            state = self.states[row]
            if index in filled:
                end = plan.starts[index] + plan.num_scheduled_tokens[index]
                state.missing = (
                    end + max(0, plan.max_sampled_tokens[index] - 1) - state.cached
                )
            elif not drafting or state.missing > COVERED_TOKENS:
                state.missing += plan.max_sampled_tokens[index]
            else:  # the step computed it, too
                self._note_cached(state, len(state.tokens))
                state.missing = (
                    plan.num_scheduled_tokens[index] - 1
                    if index in from_host
                    else int(index in drafting)
                )

    def _note_cached(self, state: DraftedRow, num_tokens: int) -> None:
        """Note that the draft model's cache has the first `num_tokens` of a row."""
        first_block = state.cached // self.block_size
        state.cached = num_tokens
        self.complete.update(state.table[first_block : num_tokens // self.block_size])

    def note_results(self, plan: Plan, yields: Yields) -> None:
        """Note a plan's results."""
        for row, gen, tokens in zip(plan.rows, plan.run_ids, yields, strict=True):
            state = self.states.get(row)
            if state is not None and state.gen == gen:
                state.tokens += tokens

    def forget(self) -> None:
        """Clear all after a failed plan: rows that continue are opened again."""
        self.states.clear()
        self.complete.clear()


def split_by_budget(
    chunks: list[MissingChunk], budget: int
) -> Iterator[list[MissingChunk]]:
    """Yields chunks in order, in parts of up to `budget` tokens."""
    batch, room = list[MissingChunk](), budget
    for chunk in chunks:
        num_taken = 0
        while num_taken < len(chunk.tokens):
            tokens = chunk.tokens[num_taken : num_taken + room]
            batch.append(MissingChunk(chunk.row, chunk.start + num_taken, tokens))
            num_taken += len(tokens)
            room -= len(tokens)
            if not room:
                yield batch
                batch, room = [], budget
    if batch:
        yield batch


def pack_chunks(chunks: list[MissingChunk]) -> tuple[StepShape, Words]:
    """Returns a forward of these chunks alone, which samples nothing."""
    counts = [len(chunk.tokens) for chunk in chunks]
    total = sum(counts)
    shape = StepShape(
        decode_rows=0,
        draws=0,
        tokens=total,
        chunks=len(chunks),
        longest=max(counts),
    )
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(shape)), np.int32)
    prefill = PrefillWords(*views(words, shape)[:3])
    rows = [chunk.row for chunk in chunks]
    prefill.tokens[0] = [token for chunk in chunks for token in chunk.tokens]
    prefill.tokens[1] = [*_positions(chunks)]
    prefill.tokens[2] = np.repeat(rows, counts)
    offsets = np.cumsum(counts) - counts
    starts = [chunk.start for chunk in chunks]
    prefill.chunks[:] = np.array([rows, starts, counts, offsets], np.int32)
    return shape, words


def _positions(chunks: list[MissingChunk]) -> Iterator[int]:
    for chunk in chunks:
        yield from range(chunk.start, chunk.start + len(chunk.tokens))
