"""Deferred sampling: rows that are sampled when the host has their masks.

Theory. A step's forward keeps the logits of such rows on the device, by row, and does not
advance the rows. A row waits for one draw at a time, so one line of logits for each row
is enough. When the host sends the masks, these rows are sampled together: tokens that the
mask does not allow get -inf; then the rows advance and are read back as others are. If a
row was given to another generation meanwhile, its kept logits have no owner: the first
generation's results are discarded, so it gets any token, and the row is not touched.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Final

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from minfer.effects.execution.contract import ExecutorError, names_of
from minfer.effects.execution.device.device_rows import (
    DeviceRows,
    SamplingNeeds,
    Words,
    aligned,
)
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import ForwardWords, layout
from minfer.effects.execution.packing.pack_plan import Draw, pick
from minfer.records.plan import Mask, Plan, SampleDeferred

# [draws, `mask_words`]: a bit for each token id, the lowest first; int32, as the device
# reads words.
Bits = NDArray[np.int32]


TOKENS_PER_WORD: Final = 32  # tokens in a word of a mask


class MaskError(ExecutorError):
    """A mask cannot be used."""


@frozen(eq=False)
class DeferredDraws:
    """Deferred draws of a step."""

    shape: StepShape
    words: Words  # as `ForwardWords.deferred`
    draw: Draw
    masks: list[bytes]  # of the draws; empty bytes: any token
    reassigned: list[int]  # entries of the plan whose rows have new owners
    # Where the masks are, if not in `masks`: lines of the memory lent for this step.
    step: int = -1
    lines: Sequence[int] | None = None


class DeferredPacker:
    """Packs deferred draws. From step to step mostly the same rows are sampled, each one
    position further: then all else is reused. (The `Draw` is the same object then; steps
    with prompts or drafts have a new one each time.)
    """

    def __init__(self, rows: DeviceRows, pad: Callable[[StepShape], StepShape]) -> None:
        """`pad` returns the shape whose graph serves a shape."""
        self.rows = rows
        self.pad = pad
        self._last_draw: Draw | None = None  # of the last step
        self._opened = -1  # value of `DeviceRows.opened` then
        self._draws: DeferredDraws | None = None  # its draws

    def pack(self, plan: Plan, draw: Draw, command: SampleDeferred) -> DeferredDraws:
        """Returns the deferred draws of `draw`, whose inputs have been computed. Raises
        MaskError.
        """
        previous = self._draws
        is_same = draw is self._last_draw and self.rows.opened == self._opened
        if previous is not None and is_same and command.written:
            words = previous.words.copy()
            _, positions = words.reshape(2, -1)
            size = len(draw.entries)
            positions[:size] = pick(plan.starts, draw.entries)
            positions[:size] += 1  # a decode row has one input
            return evolve(previous, words=words, step=plan.step)
        draws = pack_deferred(plan, draw, command, self.rows, self.pad)
        steady = not (plan.fills or plan.drafts or draws.reassigned) and command.written
        self._draws, self._last_draw = (draws, draw) if steady else (None, None)
        self._opened = self.rows.opened
        return draws


def pack_deferred(
    plan: Plan,
    draw: Draw,
    command: SampleDeferred,
    rows: DeviceRows,
    pad: Callable[[StepShape], StepShape],
) -> DeferredDraws:
    """Returns the deferred draws of `draw`, whose inputs have been computed. `pad`
    returns the shape whose graph serves a shape. Raises MaskError.
    """
    entries, owners, reassigned = draw.entries, draw.owners, list[int]()
    current = pick(rows.owners, pick(plan.rows, entries))
    if not all(map(is_, current, owners)):
        row_owners = list(zip(entries, owners, current, strict=True))
        reassigned = sorted(
            entry
            for entry, owner, current_owner in row_owners
            if current_owner is not owner
        )
        entries = [
            entry for entry, owner, current_owner in row_owners if current_owner is owner
        ]
        owners = [
            owner
            for owner, current_owner in zip(owners, current, strict=True)
            if current_owner is owner
        ]
    device_rows = pick(plan.rows, entries)
    shape = pad(_draw_shape(rows.sampling_needs(device_rows), len(device_rows)))
    masks, lines = list[bytes](), None
    if command.written:
        lines = _lines(plan, entries)
    else:
        masks = _masks(plan, entries, command.masks)
    return DeferredDraws(
        shape=shape,
        words=_words(plan, shape, entries, rows.scratch),
        draw=Draw(entries, owners),
        masks=masks,
        reassigned=reassigned,
        step=plan.step,
        lines=lines,
    )


def _draw_shape(needs: SamplingNeeds, draws: int) -> StepShape:
    return StepShape(
        decode_rows=0,
        draws=draws,
        filtered=needs.filtered,
        scored=needs.scored,
        shaped=needs.shaped,
        deferred_draws=True,
    )


def _words(plan: Plan, shape: StepShape, entries: list[int], scratch: int) -> Words:
    """Returns the words of the draws."""
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(shape)), np.int32)
    draws = ForwardWords.of(words, shape).deferred
    if draws is None:
        raise AssertionError(f"{shape} has no deferred draws")
    size = len(entries)
    draws.rows[:] = draws.positions[:] = scratch
    draws.rows[:size] = pick(plan.rows, entries)
    draws.positions[:size] = pick(plan.starts, entries)
    draws.positions[:size] += np.array(pick(plan.num_scheduled_tokens, entries), np.int32)
    return words


# --- masks ------------------------------------------------------------------------------


def _lines(plan: Plan, entries: list[int]) -> Sequence[int]:
    """Returns the lines in which the masks of these rows were written: a range where the
    lines are in the order of the rows, as nearly always.
    """
    if tuple(entries) == plan.deferred:
        return range(len(entries))
    lines = {index: line for line, index in enumerate(plan.deferred)}
    return [lines[index] for index in entries]


def _masks(plan: Plan, entries: list[int], masks: tuple[Mask, ...]) -> list[bytes]:
    """Returns the masks of these rows, in order. Raises MaskError."""
    by_row = {mask.index: mask.bits for mask in masks}
    if unknown := sorted(by_row.keys() - set(plan.deferred)):
        raise MaskError(
            f"a mask is for entry {unknown[0]} of step {plan.step}, whose "
            f"sampling is not deferred: {plan.deferred}"
        )
    return [by_row.get(index, b"") for index in entries]


def write_masks(draws: DeferredDraws, vocab: int, out: Bits) -> int:
    """Write the masks of draws into the lines of `out` [draws, `mask_words`]; returns how
    many. Raises MaskError where no token is allowed.
    """
    count = len(draws.masks)
    lines = out[:count].view(np.uint8)
    size = -(-vocab // 8)  # bytes of a mask
    for line, bits in zip(lines, draws.masks, strict=True):
        mask_bytes = np.frombuffer(bits, np.uint8)[:size]
        line[: len(mask_bytes)] = mask_bytes
        if len(mask_bytes) < size:
            line[len(mask_bytes) :] = 0 if bits else 0xFF
    lines[:, size:] = 0  # ids behind the vocabulary
    lines[:, size - 1] &= 0xFF >> -vocab % 8
    largest = out[:count].view(np.uint32).max(axis=1)  # ten times as fast as `any`
    if not largest.all():
        opened_for = draws.draw.owners[int(largest.argmin())]
        raise MaskError(f"a mask allows no token for request {names_of([opened_for])}")
    return count


def with_masks(
    command: SampleDeferred, deferred: Sequence[int], lines: Bits
) -> SampleDeferred:
    """Returns a command that has the masks that were written for it, `lines` [deferred,
    words], for another rank: it cannot read this one's memory.
    """
    rows = zip(deferred, lines, strict=False)
    return SampleDeferred(
        command.step, tuple(Mask(index, line.tobytes()) for index, line in rows)
    )


def mask_words(vocab: int) -> int:
    """Returns the words of a mask over a vocabulary."""
    return -(-vocab // TOKENS_PER_WORD)
