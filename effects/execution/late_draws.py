"""Rows that are sampled apart: when the host has said so, and with which tokens allowed.

Theory. The forward of a step keeps the logits of such rows on the device, by row, and
does not advance them. A row waits for one draw at a time, so one line of logits each is
enough. When the host's masks come, these rows are drawn together, a mask being -inf for
what it does not allow; they advance and are read back as others are. What a row kept is
nobody's if it was given to another generation meanwhile: the first one's results are void
then, so it gets any token, and the row is left alone.
"""

from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from minfer.effects.execution.device_rows import DeviceRows, Wants, Words, aligned
from minfer.effects.execution.executor import ExecutorError, names_of
from minfer.effects.execution.packing import Draw
from minfer.plan import Mask, Plan

# [draws, `mask_words`]: a bit for each token id, the lowest first. As words, as those are
# what the device reads.
Bits = NDArray[np.int32]


WORD: Final = 32  # tokens of a word of a mask


class MaskError(ExecutorError):
    """A mask cannot be used."""


@frozen(eq=False)
class LateDraw:
    """Draws of rows that were sampled apart."""

    words: Words  # [2 * aligned(draws)]: device rows, and positions of the tokens drawn
    draw: Draw
    wants: Wants
    allowed: Bits | None  # None: every token
    gone: list[int]  # places of the plan whose rows belong to others now


def pack_late(
    plan: Plan, kept: Draw, masks: tuple[Mask, ...], rows: DeviceRows
) -> LateDraw:
    """The draws of those in `kept`, each of whom has taken its inputs. Raises
    MaskError.
    """
    each = list(zip(kept.places, kept.owners, strict=True))
    here = [k for k, (i, owner) in enumerate(each) if rows.owners[plan.rows[i]] is owner]
    places = [kept.places[k] for k in here]
    draw = Draw(places, [kept.owners[k] for k in here])
    who = [plan.rows[place] for place in places]
    lines = np.full((2, aligned(len(here))), rows.scratch, np.int32)
    lines[0, : len(who)] = who
    lines[1, : len(who)] = [plan.starts[i] + plan.counts[i] for i in places]
    return LateDraw(
        words=lines.reshape(-1),
        draw=draw,
        wants=rows.wants(who) if who else Wants(filtered=False, scored=False),
        allowed=_allowed(plan, draw, masks, rows.vocab),
        gone=sorted(set(kept.places).difference(places)),
    )


def _allowed(plan: Plan, draw: Draw, masks: tuple[Mask, ...], vocab: int) -> Bits | None:
    by_place = {mask.index: mask.bits for mask in masks}
    if strangers := sorted(by_place.keys() - set(plan.apart)):
        raise MaskError(
            f"a mask is for entry {strangers[0]} of step {plan.step}, which is not "
            f"sampled apart: {plan.apart}"
        )
    found = [by_place.get(place, b"") for place in draw.places]
    if not any(found):
        return None
    allowed = np.full((len(found), mask_words(vocab)), -1, np.int32)
    of_bytes = allowed.view(np.uint8)
    for line, bits, owner in zip(of_bytes, found, draw.owners, strict=True):
        if bits:
            given = np.frombuffer(bits, np.uint8)[: len(line)]
            line[: len(given)] = given
            line[len(given) :] = 0
        line[-(-vocab // 8) :] = 0  # ids behind the vocabulary
        line[-(-vocab // 8) - 1] &= 0xFF >> -vocab % 8
        if not line.any():
            raise MaskError(f"a mask allows no token for request {names_of([owner])}")
    return allowed


def mask_words(vocab: int) -> int:
    """Words of a mask over a vocabulary."""
    return -(-vocab // WORD)
