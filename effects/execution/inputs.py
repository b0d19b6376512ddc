"""A forward's words: what goes to the device, as the host writes and the device reads it.

Theory. A forward's inputs are lines of int32, one after the other, each aligned: for
tokens from history their ids, positions and rows; for the chunks they form, rows, starts,
counts and offsets; for draws, rows and which token's logits they are from; for rows with
drafts, how many, and which; and where rows are sampled apart, who is sampled now and
whose logits are kept. (Of a step without inputs from history the device knows that
already: `DeviceRows.apart`.) Draws of those come late, with words of their own: rows and
positions.
"""

from typing import Generic, TypeVar

import numpy as np
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device_rows import DeviceRows, Words, aligned
from minfer.effects.execution.step_shape import StepShape
from minfer.params import ROW_FIELDS

Array = TypeVar("Array", Words, Tensor)


@frozen(eq=False)
class History(Generic[Array]):
    """Inputs from history: what a forward is sent for them."""

    tokens: Array  # [3, tokens]: ids, positions, device rows
    chunks: Array  # [4, chunks]: device rows, starts, counts, offsets
    draws: Array  # [2, draws]: device rows that draw; which token's logits they are from


@frozen(eq=False)
class Drafts(Generic[Array]):
    """Of rows that have drafts: what a forward is sent for them."""

    counts: Array  # [verified]: drafts of each
    said: Array  # [drafts, verified]: tokens; below 0: the draft model says them


@frozen(eq=False)
class Late(Generic[Array]):
    """Of rows that are sampled late: what their draws are sent."""

    rows: Array  # [draws] device rows
    positions: Array  # [draws] of their tokens


@frozen(eq=False)
class Inputs(Generic[Array]):
    """A forward's words, as lines; None where a kind has none."""

    history: History[Array] | None
    # [2, draws]: device rows that are sampled now; those whose logits are kept. None also
    # where the device knows
    apart: Array | None
    late: Late[Array] | None = None
    drafts: Drafts[Array] | None = None

    @classmethod
    def of(cls, words: Array, shape: StepShape) -> "Inputs[Array]":
        """Views of words, which may be longer."""
        if not (shape.tokens or shape.late or shape.drafts):
            return cls(None, None)
        lines = views(words, shape)
        apart = lines.pop() if shape.apart and shape.tokens else None
        drafts = None
        if shape.drafts:
            told = lines.pop()
            drafts = Drafts(told[0], told[1:])
        if shape.late:
            [[rows, positions]] = lines
            return cls(None, None, Late(rows, positions))
        history = History(*lines) if shape.tokens else None
        return cls(history, apart, drafts=drafts)


def views(words: Array, shape: StepShape) -> list[Array]:
    """The parts of a forward's words, as `layout` has them."""
    parts: list[Array] = []
    begin = 0
    for lines, count in layout(shape):
        end = begin + lines * aligned(count)
        part = words[begin:end].reshape(lines, aligned(count))
        parts.append(part[:, :count])
        begin = end
    return parts


def layout(shape: StepShape) -> tuple[tuple[int, int], ...]:
    """Lines of words of each part of the inputs, and words of a line."""
    history = ((3, shape.tokens), (4, shape.chunks), (2, shape.draws))
    if shape.late:
        return ((2, shape.draws),)
    drafts = ((1 + shape.drafts, shape.verified),) if shape.drafts else ()
    apart = ((2, shape.draws),) if shape.apart and shape.tokens else ()
    return (*(history if shape.tokens else ()), *drafts, *apart)


def dummy_words(shape: StepShape, scratch: int, length: int) -> Words:
    """The words of a step that is made for its own sake: all of it is the scratch row's,
    one chunk of as many inputs as a chunk of the kind has, at positions below `length`.
    """
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(shape)), np.int32)
    inputs = Inputs.of(words, shape)
    if inputs.history is not None:
        inputs.history.tokens[1] = np.arange(shape.tokens) % length
        inputs.history.tokens[2] = scratch
        inputs.history.chunks[0] = scratch
        inputs.history.chunks[2:, 0] = min(shape.longest, length), shape.decode_inputs
        inputs.history.draws[0] = scratch
    if inputs.apart is not None:
        inputs.apart[:] = scratch
    if inputs.late is not None:
        inputs.late.rows[:] = scratch
    return words


def most_words(rows: DeviceRows, tokens: int, draws: int, drafts: int = 0) -> int:
    """Words of the largest inputs, and changes: every table whole, what else rows keep,
    who decodes.
    """
    inputs = 3 * tokens + 8 * draws + 64
    if drafts:  # with their numbers; a line is aligned
        inputs += 4 * (drafts + 2)
    # Two words of each stream, those of its sampling, and its next token and position.
    kept = 2 * len(rows.streams) + len(ROW_FIELDS) + 2
    changes = rows.scratch * (rows.blocks + kept) + 3 * draws
    return inputs + 2 * changes
