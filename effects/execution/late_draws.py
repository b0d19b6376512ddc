"""Rows that are sampled apart: when the host has said so, and with which tokens allowed.

Theory. The forward of a step keeps the logits of such rows on the device, by row, and
does not advance them. A row waits for one draw at a time, so one line of logits each is
enough. When the host's masks come, these rows are drawn together, a mask being -inf for
what it does not allow; they advance and are read back as others are. What a row kept is
nobody's if it was given to another generation meanwhile: the first one's results are void
then, so it gets any token, and the row is left alone.
"""

from collections.abc import Callable
from operator import is_
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from minfer.effects.execution.device_rows import DeviceRows, Wants, Words, aligned
from minfer.effects.execution.executor import ExecutorError, names_of
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.packing import Draw, picked
from minfer.plan import Mask, Plan, SampleApart

# [draws, `mask_words`]: a bit for each token id, the lowest first. As words, as those are
# what the device reads.
Bits = NDArray[np.int32]


WORD: Final = 32  # tokens of a word of a mask


class MaskError(ExecutorError):
    """A mask cannot be used."""


@frozen(eq=False)
class LateDraw:
    """Draws of rows that were sampled apart."""

    kind: Kind
    words: Words  # [2, draws] of the kind: device rows, and positions of the tokens drawn
    draw: Draw
    masks: list[bytes]  # of each that is drawn; none of them: any token
    gone: list[int]  # places of the plan whose rows belong to others now
    # Where masks were written that `masks` does not have: a line for each that is drawn,
    # in the memory lent for this step.
    step: int = -1
    lines: list[int] | None = None


def pack_late(
    plan: Plan,
    kept: Draw,
    told: SampleApart,
    rows: DeviceRows,
    pad: Callable[[Kind], Kind],
) -> LateDraw:
    """The draws of those in `kept`, each of whom has taken its inputs. `pad` says which
    kind serves another. Raises MaskError.
    """
    places, owners, gone = kept.places, kept.owners, list[int]()
    now = picked(rows.owners, picked(plan.rows, places))
    if not all(map(is_, now, owners)):
        each = list(zip(places, owners, now, strict=True))
        gone = sorted(place for place, owner, other in each if other is not owner)
        places = [place for place, owner, other in each if other is owner]
        owners = [
            owner for owner, other in zip(owners, now, strict=True) if other is owner
        ]
    who = picked(plan.rows, places)
    kind = pad(_kind(rows.wants(who), len(who)))
    lines = np.full((2, aligned(kind.draws)), rows.scratch, np.int32)
    lines[0, : len(who)] = who
    lines[1, : len(who)] = picked(plan.starts, places)
    lines[1, : len(who)] += np.array(picked(plan.counts, places), np.int32)
    return LateDraw(
        kind=kind,
        words=lines.reshape(-1),
        draw=Draw(places, owners),
        masks=[] if told.written else _masks(plan, places, told.masks),
        gone=gone,
        step=plan.step,
        lines=_lines(plan, places) if told.written else None,
    )


def _lines(plan: Plan, places: list[int]) -> list[int]:
    """Where the masks of the places were written."""
    if (*places,) == plan.apart:
        return list(range(len(places)))
    by_place = {place: line for line, place in enumerate(plan.apart)}
    return [by_place[place] for place in places]


def _kind(wants: Wants, draws: int) -> Kind:
    return Kind(
        alone=0,
        draws=draws,
        filtered=wants.filtered,
        scored=wants.scored,
        shaped=wants.shaped,
        late=True,
    )


def _masks(plan: Plan, places: list[int], masks: tuple[Mask, ...]) -> list[bytes]:
    """Those of the places, in order."""
    by_place = {mask.index: mask.bits for mask in masks}
    if strangers := sorted(by_place.keys() - set(plan.apart)):
        raise MaskError(
            f"a mask is for entry {strangers[0]} of step {plan.step}, which is not "
            f"sampled apart: {plan.apart}"
        )
    return [by_place.get(place, b"") for place in places]


def write_masks(late: LateDraw, vocab: int, out: Bits) -> int:
    """Write the masks of draws into the lines of `out` [draws, `mask_words`], one after
    the other; returns how many. Raises MaskError where nothing is allowed.
    """
    count = len(late.masks)
    lines = out[:count].view(np.uint8)
    size = -(-vocab // 8)  # bytes of a mask
    for line, bits in zip(lines, late.masks, strict=True):
        given = np.frombuffer(bits, np.uint8)[:size]
        line[: len(given)] = given
        if len(given) < size:
            line[len(given) :] = 0 if bits else 0xFF
    lines[:, size:] = 0  # ids behind the vocabulary
    lines[:, size - 1] &= 0xFF >> -vocab % 8
    largest = out[:count].view(np.uint32).max(axis=1)  # ten times as fast as `any`
    if not largest.all():
        owner = late.draw.owners[int(largest.argmin())]
        raise MaskError(f"a mask allows no token for request {names_of([owner])}")
    return count


def mask_words(vocab: int) -> int:
    """Words of a mask over a vocabulary."""
    return -(-vocab // WORD)
