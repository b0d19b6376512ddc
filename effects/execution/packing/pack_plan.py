"""Packs a plan's forwards as words: all that is not on the device yet.

Theory. The words of a forward are the lines of its `ForwardWords`, written here with
numpy, and read on the device as views of the copy. Decode rows need no words: the device
has their inputs, and keeps the list of decode rows, and of those with deferred sampling,
until it changes. Rows with drafts come first. A prompt whose last token alone is left
becomes a decode row. Padding belongs to the scratch row.

Where steps have graphs, a plan with drafts and prefill chunks is two forwards. One
forward would need a graph for each combination of rows, drafts and tokens, and is a
thousand launches without; so each of the two has a shape with a graph, and the weights
are read twice. (A plan with deferred sampling is always one forward.)
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
from attrs import evolve, frozen

from minfer.effects.execution.device.device_rows import EMPTY, DeviceRows, Words, aligned
from minfer.effects.execution.device.step_shape import (
    DECODE_DIVISIONS,
    StepShape,
    bucket_of,
)
from minfer.effects.execution.packing.inputs import (
    ForwardWords,
    PrefillWords,
    layout,
    views,
)
from minfer.effects.execution.packing.pooling import PooledStates
from minfer.effects.execution.packing.prompt_scores import ScoredTokens
from minfer.effects.execution.packing.verified import (
    DraftOutputs,
    drafted_first,
    max_drafts_of,
    write_drafts,
)
from minfer.effects.models.layout.shapes import next_power_of_two
from minfer.records.plan import NewRow, Plan, PrefillTokens

Item = TypeVar("Item")


@frozen(eq=False)
class Draw:
    """Rows to sample, in order: entries of the plan, the rows' owners, and lines of the
    sampler's output.
    """

    entries: list[int]
    owners: list[NewRow | None]  # kept here, as rows get new owners
    lines: list[int] | None = None  # None: in order
    # Where tokens behind drafts are; of deferred rows, none.
    draft_outputs: DraftOutputs | None = None


@frozen(eq=False)
class Forward:
    """One forward of a plan: its shape, its words, and the rows to sample."""

    shape: StepShape
    words: Words
    draw: Draw
    longest: int  # the most tokens that a decode row attends to
    deferred: Draw | None = None  # rows with deferred sampling
    pooled: PooledStates | None = None  # hidden states of rows that are pooled
    scored: ScoredTokens | None = None  # of rows whose prompts are scored
    history: int = 0  # tokens before the prefill chunks, in all
    pairs: int = 0  # of an input of a chunk and a token that it attends to
    is_last: bool = True  # of its plan

    @property
    def has_extra_outputs(self) -> bool:
        """Whether outputs besides tokens are requested."""
        return self.pooled is not None or self.scored is not None


class Packer:
    """Packs plans for a device's rows. It sets the decode rows on the device when they
    change.
    """

    def __init__(
        self,
        rows: DeviceRows,
        pad: Callable[[StepShape], StepShape],
        drafts: int = 0,
        *,
        keeps_previous: bool = False,
        separates_drafts: bool = False,
    ) -> None:
        """`pad` returns the shape whose graph serves a shape; `drafts` is the room for
        drafts in a step. `keeps_previous`: rows also keep the token before their last.
        `separates_drafts`: rows with drafts and prompts are two forwards.
        """
        self.rows = rows
        self.pad = pad
        self.drafts = drafts
        self.keeps_previous = keeps_previous
        self.separates_drafts = separates_drafts
        self.members: tuple[int, ...] = ()  # rows in `rows.batch`
        self.draw = Draw([], [])  # of those that are sampled at once
        self.entries: Sequence[int] = ()  # their entries of the plan
        self.deferred_entries: tuple[
            int, ...
        ] = ()  # entries of the plan with deferred sampling
        self.deferred_draw: Draw | None = None  # of those with deferred sampling
        # of a pure decode step of these rows
        self.shape = StepShape(decode_rows=0, draws=0)

    def forget(self) -> None:
        """Mark the device's list of decode rows as outdated."""
        self.members = ()

    def forwards(self, plan: Plan) -> Iterator[Forward]:
        """Yields the forwards of a plan, in order; each has to be sent before the next is
        taken.

        Rows must have been opened already.
        """
        if plan.opens:
            self.forget()
        plan = self._with_decode_rows(plan)
        decoding = drafted_first(plan.drafts, _decode_entries(plan))
        if plan.fills and plan.drafts and self.separates_drafts and not plan.deferred:
            forward = self._decode_forward(plan, pick(plan.rows, decoding), decoding)
            yield evolve(forward, is_last=False)
            yield self._mixed_forward(plan, [])
        elif plan.fills:
            yield self._mixed_forward(plan, decoding)
        else:
            rows = pick(plan.rows, decoding) if plan.drafts else plan.rows
            yield self._decode_forward(plan, rows, decoding)

    def _with_decode_rows(self, plan: Plan) -> Plan:
        """Returns the plan without fills of a single token that is sampled from: once the
        token is on the device, such a row is a decode row. These are new requests whose
        prompts are in the cache but for the last token, and rows that waited for masks.
        There are graphs for any number of decode rows.
        """
        if not plan.fills or self.keeps_previous:
            return plan
        single_tokens = [
            fill for fill in plan.fills if self._is_like_a_decode(plan, fill)
        ]
        if not single_tokens:
            return plan
        entries = [fill.index for fill in single_tokens]
        self.rows.set_inputs(
            pick(plan.rows, entries),
            [fill.tokens[0] for fill in single_tokens],
            pick(plan.starts, entries),
        )
        moved = frozenset(entries)
        other_fills = [fill for fill in plan.fills if fill.index not in moved]
        return evolve(plan, fills=tuple(other_fills))

    def _is_like_a_decode(self, plan: Plan, fill: PrefillTokens) -> bool:
        """Returns whether a fill is one token, of a row that requests only tokens."""
        if len(fill.tokens) > 1 or not plan.max_sampled_tokens[fill.index]:
            return False
        owner = self.rows.owners[plan.rows[fill.index]]
        if owner is None or owner.pooling:
            return False
        return owner.sampling.prompt_logprobs is None

    def _decode_forward(
        self, plan: Plan, rows: tuple[int, ...], entries: list[int]
    ) -> Forward:
        """Returns a pure decode forward."""
        if not self._is_current(rows, entries, plan.deferred):
            self._set_decode_rows(plan, rows, entries)
        starts = pick(plan.starts, entries) if plan.fills else plan.starts
        longest = max(starts) + 1
        if not plan.drafts:
            return Forward(self.shape, EMPTY, self.draw, longest, self.deferred_draw)
        shape = self._with_drafts(plan, self.shape)
        words = self._zero_words(shape)
        forward = Forward(shape, words, self.draw, longest, self.deferred_draw)
        return self._with_draft_words(plan, forward)

    def _is_current(
        self, rows: tuple[int, ...], entries: Sequence[int], deferred: tuple[int, ...]
    ) -> bool:
        """Returns whether the device has these decode rows, at these entries of a plan,
        with the same deferred rows.
        """
        if deferred != self.deferred_entries:
            return False
        if rows is self.members:  # steps in steady state have the same tuple
            return True
        return rows == self.members and entries == self.entries

    def _set_decode_rows(
        self, plan: Plan, rows: tuple[int, ...], entries: Sequence[int]
    ) -> None:
        """Set the decode rows and the deferred rows on the device."""
        size = bucket_of(len(rows), DECODE_DIVISIONS)
        self.rows.set_batch(rows, size)
        self.members, self.entries, self.deferred_entries = rows, entries, plan.deferred
        needs = self.rows.sampling_needs(rows)
        self.shape = self.pad(
            StepShape(
                decode_rows=len(rows),
                draws=len(rows),
                filtered=needs.filtered,
                scored=needs.scored,
                shaped=needs.shaped,
                keeps_logits=bool(plan.deferred),
                adapters=self.rows.has_adapters(rows),
            )
        )
        draw = Draw([*entries], [self.rows.owners[row] for row in rows])
        self.draw, self.deferred_draw = draw, None
        if self.shape.keeps_logits:
            lines = np.empty((2, size), np.int32)
            self.draw, self.deferred_draw = self._split_deferred(plan, lines, draw)
            self.rows.set_sampling_split(lines)

    def _with_drafts(self, plan: Plan, shape: StepShape) -> StepShape:
        """Returns the shape of a step that also verifies a plan's drafts; padded."""
        if not plan.drafts:
            return self.pad(shape)
        proposes = not all(draft.tokens for draft in plan.drafts)
        count, max_drafts = len(plan.drafts), max_drafts_of(plan)
        shape = evolve(shape, verified=count, drafts=max_drafts, proposes=proposes)
        shape = self.pad(shape)
        # Requested drafts have priority over padding.
        for num_rows in (min(shape.verified, next_power_of_two(count)), count):
            if shape.verified * max_drafts > self.drafts:
                shape = evolve(shape, verified=num_rows)
        room = self.drafts // shape.verified
        return shape if shape.drafts <= room else evolve(shape, drafts=room)

    def _with_draft_words(self, plan: Plan, forward: Forward) -> Forward:
        """Returns the forward with the words of drafts, if there are any."""
        shape = forward.shape
        words = ForwardWords.of(forward.words, shape).drafts
        if words is None:
            return forward
        entries = drafted_first(plan.drafts, range(len(plan.rows)))
        entries = entries[: len(plan.drafts)]
        write_drafts(plan, entries, words)
        owners = [self.rows.owners[plan.rows[i]] for i in entries]
        draft_outputs = DraftOutputs.of(shape, entries, owners)
        return evolve(forward, draw=evolve(forward.draw, draft_outputs=draft_outputs))

    def _mixed_shape(self, plan: Plan, decoding: list[int], drawing: int) -> StepShape:
        """Returns the shape of a forward of decode rows and prefill chunks, before it is
        padded; `drawing` of the chunks are sampled.
        """
        counts = [len(fill.tokens) for fill in plan.fills]
        rows = pick(plan.rows, [*decoding, *(fill.index for fill in plan.fills)])
        needs = self.rows.sampling_needs(rows)
        return StepShape(
            decode_rows=len(decoding),
            draws=len(decoding) + drawing,
            filtered=needs.filtered,
            scored=needs.scored,
            shaped=needs.shaped,
            tokens=sum(counts),
            chunks=len(counts),
            longest=max(counts),
            inside=sum(save.inside > 0 for save in plan.saves),
            keeps_logits=bool(plan.deferred),
            adapters=self.rows.has_adapters(rows),
        )

    def _mixed_forward(self, plan: Plan, decoding: list[int]) -> Forward:
        """Returns a forward of decode rows, if any are in it, and prefill chunks."""
        drawing = [
            k for k, fill in enumerate(plan.fills) if plan.max_sampled_tokens[fill.index]
        ]
        counts = [len(fill.tokens) for fill in plan.fills]
        shape = self._mixed_shape(plan, decoding, len(drawing))
        shape = self._with_drafts(plan, shape) if decoding else self.pad(shape)
        words = self._zero_words(shape)
        prefill = PrefillWords(*views(words, shape)[: 4 if shape.inside else 3])
        if prefill.inside is not None:
            prefill.inside[:] = np.array([*_kept_inside(plan)], np.int32).T
        self._write_prefill(plan, prefill, counts, shape.decode_inputs)
        self._write_draws(plan, prefill, decoding, drawing, shape.decode_rows)
        entries = decoding + [plan.fills[k].index for k in drawing]
        draw_lines = [
            *range(len(decoding)),
            *range(shape.decode_rows, shape.decode_rows + len(drawing)),
        ]
        draw = Draw(
            entries, [self.rows.owners[plan.rows[i]] for i in entries], draw_lines
        )
        deferred, split_lines = None, ForwardWords.of(words, shape).sampling_split
        if split_lines is not None:
            draw, deferred = self._split_deferred(plan, split_lines, draw)
        longest = max((plan.starts[i] + 1 for i in decoding), default=1)
        starts = [plan.starts[fill.index] for fill in plan.fills]
        pairs = [
            n * start + n * (n + 1) // 2 for n, start in zip(counts, starts, strict=True)
        ]
        forward = Forward(
            shape,
            words,
            draw,
            longest,
            deferred,
            pooled=PooledStates.of(plan, self.rows, counts, shape.decode_inputs),
            scored=ScoredTokens.of(plan, self.rows, counts, shape.decode_inputs),
            history=sum(starts),
            pairs=sum(pairs),
        )
        if self.keeps_previous:
            for k in drawing:
                fill = plan.fills[k]
                self.rows.set_last(plan.rows[fill.index], fill.tokens[-1])
        return self._with_draft_words(plan, forward)

    @staticmethod
    def _zero_words(shape: StepShape) -> Words:
        words = sum(lines * aligned(count) for lines, count in layout(shape))
        return np.zeros(words, np.int32)

    def _write_prefill(
        self,
        plan: Plan,
        prefill: PrefillWords[Words],
        counts: list[int],
        decode_inputs: int,
    ) -> None:
        """Write prefill tokens, and the chunks they form, behind the inputs of decode
        rows, of which there are `decode_inputs`.
        """
        tokens, positions, owners = prefill.tokens
        total = sum(counts)
        tokens[:total] = np.concatenate(
            [np.array(fill.tokens, np.int32) for fill in plan.fills]
        )
        owners[:] = self.rows.scratch
        prefill.chunks[0] = self.rows.scratch
        chunk_rows, starts, sizes, offsets = prefill.chunks[:, : len(counts)]
        chunk_rows[:] = [plan.rows[fill.index] for fill in plan.fills]
        starts[:] = [plan.starts[fill.index] for fill in plan.fills]
        sizes[:] = counts
        offsets[:] = decode_inputs + np.cumsum(sizes) - sizes
        owners[:total] = np.repeat(chunk_rows, counts)
        # A chunk's first token is at its start, wherever it is among the others.
        positions[:total] = np.arange(total) + np.repeat(
            starts - offsets + decode_inputs, counts
        )

    def _write_draws(
        self,
        plan: Plan,
        prefill: PrefillWords[Words],
        decoding: list[int],
        drawing: list[int],
        decode_rows: int,
    ) -> None:
        """Write the rows to sample: decode rows, then the chunks `drawing`, each from its
        last token.
        """
        rows, logit_inputs = prefill.draws
        chunk_rows, _, sizes, offsets = prefill.chunks
        rows[:] = self.rows.scratch
        rows[: len(decoding)] = [plan.rows[i] for i in decoding]
        logit_inputs[:decode_rows] = np.arange(decode_rows)
        chunks = decode_rows + np.arange(len(drawing))
        rows[chunks] = chunk_rows[drawing]
        logit_inputs[chunks] = (offsets + sizes - 1)[drawing]

    def _split_deferred(
        self, plan: Plan, lines: Words, draw: Draw
    ) -> tuple[Draw, Draw | None]:
        """Returns the rows sampled now and the deferred rows, if any; writes both into
        `lines` [2, draws] for the device.
        """
        lines[:] = self.rows.scratch
        deferred = set(plan.deferred)
        draw_lines = draw.lines or range(len(draw.entries))
        if not deferred:
            lines[0, draw_lines] = pick(plan.rows, draw.entries)
            return draw, None
        if len(deferred) == len(draw.entries):  # all of them
            lines[1, draw_lines] = pick(plan.rows, draw.entries)
            return Draw([], [], []), evolve(draw, lines=list(draw_lines))
        later = [k for k, entry in enumerate(draw.entries) if entry in deferred]
        now: list[int] = []
        if len(later) < len(draw.entries):
            now = [k for k, entry in enumerate(draw.entries) if entry not in deferred]
        draws = (
            _select_draws(draw, now, draw_lines),
            _select_draws(draw, later, draw_lines),
        )
        for line, part_draw in zip(lines, draws, strict=True):
            line[part_draw.lines] = pick(plan.rows, part_draw.entries)
        return draws


def _decode_entries(plan: Plan) -> Sequence[int]:
    """Returns the entries of decode rows."""
    entries = range(len(plan.rows))
    if not plan.fills:
        return entries
    filled = {fill.index for fill in plan.fills}
    return [i for i in entries if i not in filled]


def _select_draws(draw: Draw, indices: list[int], lines: Sequence[int]) -> Draw:
    return Draw(
        entries=list(pick(draw.entries, indices)),
        owners=list(pick(draw.owners, indices)),
        lines=list(pick(lines, indices)),
    )


def pick(column: Sequence[Item], indices: Sequence[int]) -> tuple[Item, ...]:
    """Returns the elements of a column at these indices."""
    # In C, which is five times as fast for a hundred of them.
    return itemgetter(*indices, 0, 0)(column)[: len(indices)] if indices else ()


def _kept_inside(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yields the number of each chunk inside which a state is kept, and how many of its
    inputs are before that state.
    """
    numbers = {fill.index: number for number, fill in enumerate(plan.fills)}
    for save in plan.saves:
        if save.inside:
            yield numbers[save.index], save.inside - plan.starts[save.index]
