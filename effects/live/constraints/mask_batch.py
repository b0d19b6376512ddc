"""The masks of one step while they are made: their samples and results. Each row has a
line.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from attrs import define, field

from minfer.effects.live.constraints.sample_grammars import SampleGrammar
from minfer.effects.text.grammars.grammar_library import GrammarError, MatcherUpdate
from minfer.effects.text.grammars.mask_lines import Lines, bits_of
from minfer.records.messages import Finish
from minfer.records.plan import Mask, Plan

STUCK_ERROR: Final = "the grammar cannot go on"  # prefix of errors that end a sample


@define(eq=False)
class MaskBatch:
    """The deferred rows of a step, by their lines of masks."""

    count: int = 0  # lines
    samples: dict[int, SampleGrammar] = field(factory=dict)
    lengths: dict[int, int] = field(factory=dict)  # of outputs before this token
    moves: list[MatcherUpdate] = field(factory=list)  # masks that are to be made
    made: list[int] = field(factory=list)  # lines whose mask a thread has made
    free: list[int] = field(factory=list)  # rows that may draw any token
    errors: dict[int, GrammarError] = field(factory=dict)  # lines that cannot continue
    # Lines by the tokens that they must not allow.
    barred_tokens: dict[frozenset[int], list[int]] = field(
        factory=lambda: defaultdict(list)
    )

    @classmethod
    def of(cls, plan: Plan) -> "MaskBatch":
        """Returns the batch of a plan's rows, still empty."""
        return cls(count=len(plan.deferred))

    def masks(self, plan: Plan, lines: Lines) -> Iterator[Mask]:
        """Yields the masks of all rows that may not sample any token."""
        free = frozenset(self.free)
        for line, index in enumerate(plan.deferred):
            if line not in free:
                yield Mask(index, bits_of(lines[line]))

    def end(self, empty_lines: Collection[int]) -> tuple[Finish, ...]:
        """Returns the ends of samples with errors, and of those in `empty_lines`: lines
        without any allowed token. Their rows may sample any token.
        """
        ends = []
        for line, grammar in self.samples.items():
            length, error = self.lengths[line], self.errors.get(line)
            if error is not None:
                ends.append(
                    Finish(*grammar.name, length, "error", f"{STUCK_ERROR}: {error}")
                )
            elif line in empty_lines:
                ends.append(Finish(*grammar.name, length))
            else:
                continue
            self.free.append(line)
        return tuple(ends)
