"""A plan's forwards as words: what each needs that is not on the device yet.

Theory. A forward's inputs are lines of int32, one after the other, each aligned: for
tokens from history their ids, positions and rows; for the chunks they form, rows, starts,
counts and offsets; for draws, rows and which token's logits they are from; and where rows
are sampled apart, who is sampled now and whose logits are kept. Rows that feed themselves
need no words: the device has all of it, and knows who decodes until that changes. Padding
belongs to the scratch row. The same `Inputs` is written here with numpy, and read on the
device as views of what was copied.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.device_rows import EMPTY, DeviceRows, Words, aligned
from minfer.effects.execution.kinds import DECODE, Kind, bucket_of
from minfer.effects.execution.pooling import Wanted
from minfer.effects.execution.prompt_scores import Targets
from minfer.params import ROW_FIELDS
from minfer.plan import Open, Plan

Array = TypeVar("Array", Words, Tensor)
Item = TypeVar("Item")


@frozen(eq=False)
class Draw:
    """Who draws, in order: entries of the plan, whose their rows were, places among what
    is drawn.
    """

    places: list[int]
    owners: list[Open | None]  # kept here, as rows change hands
    at: list[int] | None = None  # None: in order


@frozen(eq=False)
class Forward:
    """One forward of a plan: what it launches, what it is sent, and who draws."""

    kind: Kind
    words: Words
    draw: Draw
    longest: int  # the most tokens that a row which feeds itself attends to
    kept: Draw | None = None  # who is sampled apart
    wanted: Wanted | None = None  # the states of rows that are pooled
    targets: Targets | None = None  # of rows whose prompts are scored

    @property
    def asks(self) -> bool:
        """Whether something is wanted besides tokens."""
        return self.wanted is not None or self.targets is not None


@frozen(eq=False)
class History(Generic[Array]):
    """Inputs from history: what a forward is sent for them."""

    tokens: Array  # [3, tokens]: ids, positions, device rows
    chunks: Array  # [4, chunks]: device rows, starts, counts, offsets
    draws: Array  # [2, draws]: device rows that draw; which token's logits they are from


@frozen(eq=False)
class Inputs(Generic[Array]):
    """A forward's words, as lines; None where a kind has none."""

    history: History[Array] | None
    # [2, draws]: device rows that are sampled now; those whose logits are kept
    apart: Array | None
    # [2, draws]: device rows that are sampled late; positions of their tokens
    late: Array | None = None

    @classmethod
    def of(cls, words: Array, kind: Kind) -> "Inputs[Array]":
        """Views of words, which may be longer."""
        if not (kind.tokens or kind.apart or kind.late):
            return cls(None, None)
        lines = views(words, kind)
        if kind.late:
            return cls(None, None, *lines)
        apart = lines.pop() if kind.apart else None
        return cls(History(*lines) if kind.tokens else None, apart)


def views(words: Array, kind: Kind) -> list[Array]:
    """The parts of a forward's words, as `layout` has them."""
    parts: list[Array] = []
    begin = 0
    for lines, count in layout(kind):
        end = begin + lines * aligned(count)
        part = words[begin:end].reshape(lines, aligned(count))
        parts.append(part[:, :count])
        begin = end
    return parts


def layout(kind: Kind) -> tuple[tuple[int, int], ...]:
    """Lines of words of each part of the inputs, and words of a line."""
    history = ((3, kind.tokens), (4, kind.chunks), (2, kind.draws))
    if kind.late:
        return ((2, kind.draws),)
    apart = ((2, kind.draws),) if kind.apart else ()
    return (*(history if kind.tokens else ()), *apart)


def nobodys(kind: Kind, scratch: int, length: int) -> Words:
    """The words of a step that is made for its own sake: all of it is the scratch row's,
    one chunk of as many inputs as a chunk of the kind has, at positions below `length`.
    """
    words = np.zeros(sum(lines * aligned(n) for lines, n in layout(kind)), np.int32)
    inputs = Inputs.of(words, kind)
    if inputs.history is not None:
        inputs.history.tokens[1] = np.arange(kind.tokens) % length
        inputs.history.tokens[2] = scratch
        inputs.history.chunks[0] = scratch
        inputs.history.chunks[2:, 0] = min(kind.longest, length), kind.alone
        inputs.history.draws[0] = scratch
    if inputs.apart is not None:
        inputs.apart[:] = scratch
    if inputs.late is not None:
        inputs.late[0] = scratch
    return words


def most_words(rows: DeviceRows, tokens: int, draws: int) -> int:
    """Words of the largest inputs, and changes: every table whole, what else rows keep,
    who decodes.
    """
    inputs = 3 * tokens + 8 * draws + 64
    kept = 2 + len(ROW_FIELDS)  # a stream's two words, and those of its sampling
    changes = rows.scratch * (rows.blocks + kept) + draws
    return inputs + 2 * changes


class Packer:
    """Packs plans for a device's rows. It notes who decodes where that changes."""

    def __init__(self, rows: DeviceRows, pad: Callable[[Kind], Kind]) -> None:
        """`pad` says which kind serves another."""
        self.rows = rows
        self.pad = pad
        self.members: tuple[int, ...] = ()  # whose rows are in `rows.batch`
        self.draw = Draw([], [])  # theirs
        self.kind = Kind(alone=0, draws=0)  # of a step in which they feed themselves

    def forget(self) -> None:
        """What the device knows of who decodes does not hold any more."""
        self.members = ()

    def forwards(self, plan: Plan) -> Iterator[Forward]:
        """The forwards of a plan, in order; each has to be sent before the next is taken.

        Rows must have been opened already.
        """
        if plan.opens:
            self.forget()
        if plan.fills:
            yield self._mixed(plan)
        elif plan.repeat == 1:
            yield self._decode(plan, plan.rows, list(range(len(plan.rows))), 0)
        if plan.repeat > 1:
            yield from self._repeated(plan, 1 if plan.fills else 0)

    def _repeated(self, plan: Plan, first: int) -> Iterator[Forward]:
        """Forwards in which those take part that may yield so many tokens."""
        for turn in range(first, plan.repeat):
            live = [i for i, most in enumerate(plan.most) if most > turn]
            if live:
                everybody = len(live) == len(plan.rows)
                rows = plan.rows if everybody else tuple(plan.rows[i] for i in live)
                yield self._decode(plan, rows, live, turn)

    def _decode(
        self, plan: Plan, rows: tuple[int, ...], places: list[int], turn: int
    ) -> Forward:
        """Every row feeds itself."""
        if rows is not self.members:
            self.rows.set_batch(rows, bucket_of(len(rows), DECODE))
            self.members = rows
            self.draw = Draw(places, [self.rows.owners[row] for row in rows])
            wants = self.rows.wants(rows)
            self.kind = self.pad(
                Kind(
                    alone=len(rows),
                    draws=len(rows),
                    filtered=wants.filtered,
                    scored=wants.scored,
                    shaped=wants.shaped,
                )
            )
        longest = max(plan.starts) + turn + 1
        if not plan.apart:
            return Forward(self.kind, EMPTY, self.draw, longest)
        kind = evolve(self.kind, apart=True)
        words = self._empty(kind)
        now, kept = self._split(plan, views(words, kind)[-1], self.draw)
        return Forward(kind, words, now, longest, kept)

    def _mixed(self, plan: Plan) -> Forward:
        """Rows that feed themselves, and chunks of history."""
        filled = {fill.index for fill in plan.fills}
        selves = [i for i in range(len(plan.rows)) if i not in filled]
        drawing = [k for k, fill in enumerate(plan.fills) if plan.most[fill.index]]
        counts = [len(fill.tokens) for fill in plan.fills]
        wants = self.rows.wants(plan.rows)
        kind = self.pad(
            Kind(
                alone=len(selves),
                draws=len(selves) + len(drawing),
                filtered=wants.filtered,
                scored=wants.scored,
                shaped=wants.shaped,
                tokens=sum(counts),
                chunks=len(counts),
                longest=max(counts),
                apart=bool(plan.apart),
            )
        )
        words = self._empty(kind)
        history = History(*views(words, kind)[:3])
        self._write_history(plan, history, counts, kind.alone)
        self._write_draws(plan, history, selves, drawing, kind.alone)
        places = selves + [plan.fills[k].index for k in drawing]
        at = [*range(len(selves)), *range(kind.alone, kind.alone + len(drawing))]
        draw = Draw(places, [self.rows.owners[plan.rows[i]] for i in places], at)
        longest = max((plan.starts[i] + 1 for i in selves), default=1)
        forward = Forward(
            kind,
            words,
            draw,
            longest,
            wanted=Wanted.of(plan, self.rows, counts, kind.alone),
            targets=Targets.of(plan, self.rows, counts, kind.alone),
        )
        if not plan.apart:
            return forward
        now, kept = self._split(plan, views(words, kind)[-1], draw)
        return evolve(forward, draw=now, kept=kept)

    @staticmethod
    def _empty(kind: Kind) -> Words:
        words = sum(lines * aligned(count) for lines, count in layout(kind))
        return np.zeros(words, np.int32)

    def _write_history(
        self, plan: Plan, history: History[Words], counts: list[int], alone: int
    ) -> None:
        """Tokens from history, and the chunks they form, behind `alone` rows that feed
        themselves.
        """
        tokens, positions, owners = history.tokens
        total = sum(counts)
        tokens[:total] = np.concatenate(
            [np.array(fill.tokens, np.int32) for fill in plan.fills]
        )
        owners[:] = self.rows.scratch
        history.chunks[0] = self.rows.scratch
        where, starts, sizes, offsets = history.chunks[:, : len(counts)]
        where[:] = [plan.rows[fill.index] for fill in plan.fills]
        starts[:] = [plan.starts[fill.index] for fill in plan.fills]
        sizes[:] = counts
        offsets[:] = alone + np.cumsum(sizes) - sizes
        owners[:total] = np.repeat(where, counts)
        # A chunk's first input is at its start, wherever it lies among the others.
        positions[:total] = np.arange(total) + np.repeat(starts - offsets + alone, counts)

    def _write_draws(
        self,
        plan: Plan,
        history: History[Words],
        selves: list[int],
        drawing: list[int],
        alone: int,
    ) -> None:
        """Who draws: rows that feed themselves, then the chunks `drawing`, each from its
        last input.
        """
        who, wanted = history.draws
        where, _, sizes, offsets = history.chunks
        who[:] = self.rows.scratch
        who[: len(selves)] = [plan.rows[i] for i in selves]
        wanted[:alone] = np.arange(alone)
        chunks = alone + np.arange(len(drawing))
        who[chunks] = where[drawing]
        wanted[chunks] = (offsets + sizes - 1)[drawing]

    def _split(self, plan: Plan, lines: Words, draw: Draw) -> tuple[Draw, Draw]:
        """Who is sampled now, and who is sampled apart; `lines` [2, draws] say so to the
        device.
        """
        lines[:] = self.rows.scratch
        apart = set(plan.apart)
        at = draw.at or range(len(draw.places))
        later = [k for k, place in enumerate(draw.places) if place in apart]
        here: list[int] = []
        if len(later) < len(draw.places):
            here = [k for k, place in enumerate(draw.places) if place not in apart]
        two = _some(draw, here, at), _some(draw, later, at)
        for line, some in zip(lines, two, strict=True):
            line[some.at] = picked(plan.rows, some.places)
        return two


def _some(draw: Draw, which: list[int], at: Sequence[int]) -> Draw:
    return Draw(
        places=list(picked(draw.places, which)),
        owners=list(picked(draw.owners, which)),
        at=list(picked(at, which)),
    )


def picked(column: Sequence[Item], places: Sequence[int]) -> tuple[Item, ...]:
    """The entries at these places."""
    # In C, which for a hundred of them is five times as fast.
    return itemgetter(*places, 0, 0)(column)[: len(places)] if places else ()
