"""Rows that are sampled apart: when the host has said so, and with which tokens allowed.

Theory. The forward of a step keeps the logits of such rows on the device, by row, and
does not advance them. A row waits for one draw at a time, so one line of logits each is
enough. When the host's masks come, these rows are drawn together, a mask being -inf for
what it does not allow; they advance and are read back as others are. What a row kept is
nobody's if it was given to another generation meanwhile: the first one's results are void
then, so it gets any token, and the row is left alone.

Rows with drafts come first, as in their forward. Of them the logits behind each draft are
kept besides, for one step: the next is not handed over before all of this one is drawn.
They are judged as other rows with drafts are (judging.py), each place by a mask of its
own, as far as the host says that its masks go.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Final

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from minfer.effects.execution.device_rows import DeviceRows, Wants, Words, aligned
from minfer.effects.execution.executor import ExecutorError, names_of
from minfer.effects.execution.inputs import Inputs, layout
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.packing import Draw, picked
from minfer.effects.execution.verified import Further
from minfer.plan import Mask, Open, Plan, SampleApart, lines_apart

# [draws, `mask_words`]: a bit for each token id, the lowest first. As words, as those are
# what the device reads.
Bits = NDArray[np.int32]


WORD: Final = 32  # tokens of a word of a mask


class MaskError(ExecutorError):
    """A mask cannot be used."""


@frozen(eq=False)
class LateDraw:
    """Draws of rows that were sampled apart.

    Masks are those of the draws; where there are drafts, these are padded to the kind's
    number, and those of the places behind drafts follow, place by place; each of these
    parts is aligned.
    """

    kind: Kind
    words: Words  # as `Inputs.late`, and drafts
    draw: Draw
    masks: list[bytes]  # none of them: any token
    gone: list[int]  # places of the plan whose rows belong to others now
    # Where masks were written that `masks` does not have: lines of the memory lent for
    # this step.
    step: int = -1
    lines: Sequence[int] | None = None

    def owner(self, line: int) -> Open | None:
        """Whose mask one is."""
        behind = line - aligned(self.kind.draws)
        if self.kind.drafts and behind >= 0:
            line = behind % aligned(self.kind.verified)
        return self.draw.owners[line]


class LatePacker:
    """Packs draws that come late. From step to step mostly the same rows draw, each a
    position further on: then all else is kept. (Who draws is the same record then; steps
    with prompts or drafts have a new one each time.)
    """

    def __init__(self, rows: DeviceRows, pad: Callable[[Kind], Kind]) -> None:
        """`pad` says which kind serves another."""
        self.rows = rows
        self.pad = pad
        self._kept: Draw | None = None  # of the last step
        self._opened = -1  # rows had been opened by then
        self._late: LateDraw | None = None  # its draws

    def pack(self, plan: Plan, kept: Draw, told: SampleApart) -> LateDraw:
        """The draws of those in `kept`, each of whom has taken its inputs. Raises
        MaskError.
        """
        before = self._late
        same = kept is self._kept and self.rows.opened == self._opened
        if before is not None and same and told.written and not told.stands:
            words = before.words.copy()
            _, positions = words.reshape(2, -1)
            size = len(kept.places)
            positions[:size] = picked(plan.starts, kept.places)
            positions[:size] += 1  # who decodes takes one input
            return evolve(before, words=words, step=plan.step)
        late = pack_late(plan, kept, told, self.rows, self.pad)
        steady = not (plan.fills or plan.drafts or late.gone) and told.written
        self._late, self._kept = (late, kept) if steady else (None, None)
        self._opened = self.rows.opened
        return late


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
    counts = _drafts(plan, kept.further, told, places)
    kind = pad(_kind(rows.wants(who), len(who), counts))
    if kept.further is not None:  # there may have been less room than for padding
        kind = evolve(kind, drafts=min(kind.drafts, kept.further.drafts))
    masks, lines = list[bytes](), None
    if told.written:
        lines = _lines(plan, kind, places, counts)
    else:
        masks = _masks(plan, _order(kind, places, counts), told.masks)
    return LateDraw(
        kind=kind,
        words=_words(plan, kind, places, counts, rows.scratch, kept.further),
        draw=Draw(places, owners, further=_further(kind, places, owners, counts)),
        masks=masks,
        gone=gone,
        step=plan.step,
        lines=lines,
    )


def _kind(wants: Wants, draws: int, counts: list[int]) -> Kind:
    return Kind(
        alone=0,
        draws=draws,
        filtered=wants.filtered,
        scored=wants.scored,
        shaped=wants.shaped,
        late=True,
        verified=len(counts),
        drafts=max(counts, default=0),
    )


def _drafts(
    plan: Plan, further: Further | None, told: SampleApart, places: list[int]
) -> list[int]:
    """How many drafts are judged of each row that has some, which come first of all;
    nothing if none are. Raises MaskError.
    """
    stands = {one.index: one.most for one in told.stands}
    here = {draft.index for draft in plan.drafts}.intersection(plan.apart)
    if strangers := sorted(stands.keys() - here):
        raise MaskError(
            f"entry {strangers[0]} of step {plan.step} has no drafts that could stand"
        )
    if further is None:
        return []
    most = {i: min(plan.counts[i] - 1, further.drafts) for i in here}
    counts = [min(most[i], stands.get(i, most[i])) for i in places if i in here]
    return counts if any(counts) else []


def _further(
    kind: Kind, places: list[int], owners: list[Open | None], counts: list[int]
) -> Further | None:
    if not kind.drafts:
        return None
    return Further.of(kind, places[: len(counts)], owners[: len(counts)])


def _words(
    plan: Plan,
    kind: Kind,
    places: list[int],
    counts: list[int],
    scratch: int,
    kept: Further | None,
) -> Words:
    """What the draws are sent. `kept` says where the logits behind drafts are."""
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(kind)), np.int32)
    inputs = Inputs.of(words, kind)
    if inputs.late is None:
        raise AssertionError(f"{kind} is not late")
    late, size = inputs.late, len(places)
    late.rows[:] = late.positions[:] = scratch
    late.rows[:size] = picked(plan.rows, places)
    drafted = frozenset(() if kept is None else kept.places)
    # Drafts are inputs, too, and what is drawn first comes before them.
    inputs_of = [1 if i in drafted else plan.counts[i] for i in places]
    late.positions[:size] = picked(plan.starts, places)
    late.positions[:size] += np.array(inputs_of, np.int32)
    if inputs.drafts is not None and late.behind is not None and kept is not None:
        some = places[: len(counts)]
        said = {draft.index: draft.tokens for draft in plan.drafts}
        inputs.drafts.counts[: len(some)] = counts
        for v, (place, count) in enumerate(zip(some, counts, strict=True)):
            inputs.drafts.said[:count, v] = said[place][:count]
        at = np.array([kept.places.index(place) for place in some], np.int32)
        steps = np.arange(kind.drafts, dtype=np.int32) * kept.verified
        late.behind[:, : len(some)] = steps[:, None] + at
    return words


# --- masks ------------------------------------------------------------------------------

At = tuple[int, int] | None  # an entry of the plan and a place of it; None: nobody's


def _order(kind: Kind, places: list[int], counts: list[int]) -> list[At]:
    """Whose masks the draws read, line by line."""
    order: list[At] = [(index, 0) for index in places]
    if kind.drafts:
        order += [None] * (aligned(kind.draws) - len(order))
        for place in range(1, kind.drafts + 1):
            each = zip(places, counts, strict=False)
            here: list[At] = [(i, place) if place <= n else None for i, n in each]
            order += [*here, *[None] * (aligned(kind.verified) - len(counts))]
    return order


def _lines(plan: Plan, kind: Kind, places: list[int], counts: list[int]) -> Sequence[int]:
    """In which lines these were written; for nobody's any does. A range where that is the
    order in which they are read, as nearly always.
    """
    if not kind.drafts and tuple(places) == plan.apart:
        return range(len(places))
    lines = lines_apart(plan)
    order = _order(kind, places, counts)
    return [0 if at is None else lines[at] for at in order]


def _masks(plan: Plan, order: list[At], masks: tuple[Mask, ...]) -> list[bytes]:
    """Masks in this order."""
    by_place = {(mask.index, mask.place): mask.bits for mask in masks}
    if strangers := sorted(by_place.keys() - lines_apart(plan).keys()):
        index, place = strangers[0]
        behind = f" behind {place} drafts" if place else ""
        raise MaskError(
            f"a mask is for entry {index} of step {plan.step}{behind}, which is not "
            f"sampled apart: {plan.apart}"
        )
    return [b"" if at is None else by_place.get(at, b"") for at in order]


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
        owner = late.owner(int(largest.argmin()))
        raise MaskError(f"a mask allows no token for request {names_of([owner])}")
    return count


def mask_words(vocab: int) -> int:
    """Words of a mask over a vocabulary."""
    return -(-vocab // WORD)
