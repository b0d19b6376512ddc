"""A forward's words: what the host writes and the device reads.

Theory. A forward's inputs are lines of int32, one after the other, each aligned: for
prefill tokens their ids, positions and rows; for the chunks they form, rows, starts,
counts and offsets; for draws, rows and the token whose logits each uses; for states that
are kept inside chunks, which chunks, and where; for rows with drafts, how many, and
which; and for deferred sampling, the rows sampled now and the rows whose logits are kept.
(For a step without prefill tokens the device has these already:
`DeviceRows.sampling_split`.) Deferred draws have words of their own: rows and positions.
"""

from typing import Generic, TypeVar

import numpy as np
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.device_rows import DeviceRows, Words, aligned
from minfer.effects.execution.device.step_shape import StepShape
from minfer.sampling.params import ROW_FIELDS

Array = TypeVar("Array", Words, Tensor)


@frozen(eq=False)
class PrefillWords(Generic[Array]):
    """Words of prefill tokens."""

    tokens: Array  # [3, tokens]: ids, positions, device rows
    chunks: Array  # [4, chunks]: device rows, starts, counts, offsets
    draws: Array  # [2, draws]: device rows to sample; the token whose logits each uses
    # [2, inside]: chunks inside which a state is kept; how many inputs are before it
    inside: Array | None = None


@frozen(eq=False)
class DraftWords(Generic[Array]):
    """Words of rows that have drafts."""

    counts: Array  # [verified]: number of drafts of each
    tokens: Array  # [drafts, verified]: tokens; below 0: the drafter makes them


@frozen(eq=False)
class DeferredWords(Generic[Array]):
    """Words of deferred draws."""

    rows: Array  # [draws] device rows
    positions: Array  # [draws] of their tokens


@frozen(eq=False)
class ForwardWords(Generic[Array]):
    """A forward's words, as lines; None for parts that its shape does not have."""

    prefill: PrefillWords[Array] | None
    # [2, draws]: device rows that are sampled now; those whose logits are kept. None also
    # where the device has them already.
    sampling_split: Array | None
    deferred: DeferredWords[Array] | None = None
    drafts: DraftWords[Array] | None = None

    @classmethod
    def of(cls, words: Array, shape: StepShape) -> "ForwardWords[Array]":
        """Returns views of words, which may be longer."""
        if not (shape.tokens or shape.deferred_draws or shape.drafts):
            return cls(None, None)
        lines = views(words, shape)
        sampling_split = lines.pop() if shape.keeps_logits and shape.tokens else None
        drafts = None
        if shape.drafts:
            draft_lines = lines.pop()
            drafts = DraftWords(draft_lines[0], draft_lines[1:])
        if shape.deferred_draws:
            [[rows, positions]] = lines
            return cls(None, None, DeferredWords(rows, positions))
        prefill = PrefillWords(*lines) if shape.tokens else None
        return cls(prefill, sampling_split, drafts=drafts)


def views(words: Array, shape: StepShape) -> list[Array]:
    """Returns the parts of a forward's words, in the order of `layout`."""
    sections: list[Array] = []
    begin = 0
    for lines, count in layout(shape):
        end = begin + lines * aligned(count)
        section = words[begin:end].reshape(lines, aligned(count))
        sections.append(section[:, :count])
        begin = end
    return sections


def layout(shape: StepShape) -> tuple[tuple[int, int], ...]:
    """Returns the lines of each part of the inputs, and the words of a line."""
    inside = ((2, shape.inside),) if shape.inside else ()
    prefill = ((3, shape.tokens), (4, shape.chunks), (2, shape.draws), *inside)
    if shape.deferred_draws:
        return ((2, shape.draws),)
    drafts = ((1 + shape.drafts, shape.verified),) if shape.drafts else ()
    sampling_split = ((2, shape.draws),) if shape.keeps_logits and shape.tokens else ()
    return (*(prefill if shape.tokens else ()), *drafts, *sampling_split)


def dummy_words(shape: StepShape, scratch: int, length: int) -> Words:
    """Returns the words of a dummy step: all inputs belong to the scratch row, in one
    chunk of the shape's longest length, at positions below `length`.
    """
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(shape)), np.int32)
    inputs = ForwardWords.of(words, shape)
    if inputs.prefill is not None:
        inputs.prefill.tokens[1] = np.arange(shape.tokens) % length
        inputs.prefill.tokens[2] = scratch
        inputs.prefill.chunks[0] = scratch
        inputs.prefill.chunks[2:, 0] = min(shape.longest, length), shape.decode_inputs
        inputs.prefill.draws[0] = scratch
    if inputs.sampling_split is not None:
        inputs.sampling_split[:] = scratch
    if inputs.deferred is not None:
        inputs.deferred.rows[:] = scratch
    return words


def max_words(rows: DeviceRows, tokens: int, draws: int, drafts: int = 0) -> int:
    """Returns the words of the largest inputs and changes: all block tables, all other
    values of rows, and the decode rows.
    """
    inputs = 3 * tokens + 10 * draws + 64
    if drafts:  # with their counts; a line is aligned
        inputs += 4 * (drafts + 2)
    # Two words of each stream, those of sampling values, the next token and position, and
    # the adapter's slot.
    words_per_row = 2 * len(rows.streams) + len(ROW_FIELDS) + 3
    pages = len(rows.table) * rows.blocks + 2 * rows.state_pages
    changes = rows.scratch * (pages + words_per_row) + 3 * draws
    return inputs + 2 * changes
