"""The masks of one step while they are made: whose they are, and what came of each.

Each row has a line; where rows have drafts, lines for the masks behind these follow, as
`minfer.plan.lines_apart` says. Those may go less far than drafts do: then no more of them
may stand, and the row is due again where the masks ended. So what comes of an output is
found out where it is without drafts, an end by the grammar as well as an error.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from attrs import define, field

from minfer.effects.live.walks import Walk, barred
from minfer.effects.text.grammars.lines import Lines, bits_of
from minfer.effects.text.grammars.protocol import GrammarError, Move
from minfer.messages import Finish
from minfer.plan import Mask, Plan, Stand, lines_apart

STUCK: Final = "the grammar cannot go on"  # how errors begin that end a sample


@define(eq=False)
class Behind:
    """A row's drafts, and the masks behind them."""

    index: int  # in the plan's columns
    line: int  # of the row's first mask
    first: int  # of those behind drafts
    drafts: tuple[int, ...]
    reached: int = 0  # masks that there are

    @property
    def lines(self) -> range:
        """Those of all drafts."""
        return range(self.first, self.first + len(self.drafts))


@define(eq=False)
class Batch:
    """The rows of a step that are sampled apart, by their lines of masks."""

    behind: list[Behind] = field(factory=list)  # who of them has drafts
    count: int = 0  # lines
    walks: dict[int, Walk] = field(factory=dict)
    lengths: dict[int, int] = field(factory=dict)  # of outputs by then
    moves: list[Move] = field(factory=list)  # masks that are to be made
    made: list[int] = field(factory=list)  # those that a thread has made
    free: list[int] = field(factory=list)  # rows that may draw any token
    errors: dict[int, GrammarError] = field(factory=dict)  # who cannot go on, and why
    # Lines that may not allow these tokens.
    barred: dict[frozenset[int], list[int]] = field(factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, plan: Plan) -> "Batch":
        """The rows of a plan, of whom nothing is known yet."""
        if not plan.drafts:
            return cls(count=len(plan.apart))
        drafts = {draft.index: draft.tokens for draft in plan.drafts}
        lines = lines_apart(plan)
        behind = [
            Behind(index, line, lines[index, 1], drafts[index])
            for line, index in enumerate(plan.apart)
            if index in drafts
        ]
        return cls(behind, len(lines))

    def ask_behind(self) -> None:
        """Have the masks behind drafts made with those before them."""
        moves = {one.line: one for one in self.moves} if self.behind else {}
        for one in self.behind:
            if (move := moves.get(one.line)) is not None:
                move.drafts, move.behind = one.drafts, one.first

    def heard_behind(self) -> None:
        """Learn which masks behind drafts were made; none of those that a thread made."""
        moves = {one.line: one for one in self.moves} if self.behind else {}
        for one in self.behind:
            move, walk = moves.get(one.line), self.walks.get(one.line)
            if move is None or walk is None:
                continue
            one.reached = move.reached
            for place in range(1, one.reached + 1):
                length = self.lengths[one.line] + place
                never = walk.never if length >= walk.min_tokens else barred(walk)
                self.barred[never].append(one.first + place - 1)

    def stands(self, empty: Collection[int]) -> tuple[Stand, ...]:
        """Of whom not all drafts may stand: behind them there is no mask, or it is one of
        the `empty` lines. Who is free to draw any token is so behind drafts.
        """
        found, free = list[Stand](), frozenset(self.free)
        for one in self.behind:
            if one.line in free:
                self.free += one.lines
                continue
            there = one.lines[: one.reached]
            most = next((i for i, line in enumerate(there) if line in empty), one.reached)
            if most < len(one.drafts):
                found.append(Stand(one.index, most))
            one.reached = most
        return tuple(found)

    def masks(self, plan: Plan, lines: Lines) -> Iterator[Mask]:
        """Those of all who are not free to draw any token."""
        free = frozenset(self.free)
        for line, index in enumerate(plan.apart):
            if line not in free:
                yield Mask(index, bits_of(lines[line]))
        for one in self.behind:
            for place, line in enumerate(one.lines[: one.reached], 1):
                yield Mask(one.index, bits_of(lines[line]), place)

    def end(self, empty: Collection[int]) -> tuple[Finish, ...]:
        """Have those draw any token who are at their end, and say why they are; `empty`:
        lines of whom nothing is left to be drawn.
        """
        ends = []
        for line, walk in self.walks.items():
            length, error = self.lengths[line], self.errors.get(line)
            if error is not None:
                ends.append(Finish(*walk.name, length, "error", f"{STUCK}: {error}"))
            elif line in empty:
                ends.append(Finish(*walk.name, length))
            else:
                continue
            self.free.append(line)
        return tuple(ends)
