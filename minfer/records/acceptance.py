"""What is known of drafts: how often they were accepted lately, and what steps cost.

Of both, `minfer.speculate.length` computes how many drafts pay.
"""

import math
from bisect import bisect_left
from typing import Any

from attrs import field, frozen

from minfer.values.checks import ConfigError, number

Table = tuple[tuple[int, float], ...]  # of sizes and seconds


def _setting(default: float, **options: Any) -> Any:
    return field(default=default, validator=number(0, prefix="speculation: ", **options))


@frozen(kw_only=True)
class Learning:
    """How quickly estimates change. Raises ConfigError for values that are not from 0 to
    1.
    """

    assumed: float = _setting(0.6)  # acceptance, before anything is known
    # The weight of the prior, in drafts: a few rejected drafts do not stop drafting.
    weight: float = _setting(10.0, above=True)
    kept: float = _setting(0.98)  # decay of older counts, whenever drafts were verified
    most: float = _setting(100.0, above=True)  # drafts that are remembered
    # Decay for each step without drafts: a row without drafts is tried again before most
    # answers end.
    rested: float = _setting(0.995)

    def __attrs_post_init__(self) -> None:
        for name in ("assumed", "kept", "rested"):
            if getattr(self, name) > 1:
                raise ConfigError(f"speculation: {name} must be at most 1")


@frozen
class Acceptance:
    """Recent acceptance of the drafts of a row, or of all rows."""

    judged: float = 0.0  # drafts whose predecessors were all accepted
    accepted: float = 0.0  # of these

    def updated(self, learning: Learning, judged: int, accepted: int) -> "Acceptance":
        """The record after a step in which `judged` drafts counted, or none."""
        fade = learning.kept if judged else learning.rested
        count, right = self.judged * fade + judged, self.accepted * fade + accepted
        if count <= learning.most:
            return Acceptance(count, right)
        # A bound on the counts: with a long memory, drafting would stop too late.
        share = learning.most / count
        return Acceptance(count * share, right * share)

    def rested(self, learning: Learning, steps: int) -> "Acceptance":
        """The record after `steps` steps without drafts."""
        fade = learning.rested**steps
        return Acceptance(self.judged * fade, self.accepted * fade)

    def likelihood(self, learning: Learning, assumed: float, fade: float = 1.0) -> float:
        """The probability that the next draft is accepted, if those before it are; close
        to `assumed` while the counts, of which the share `fade` is left, are small.
        """
        hits = self.accepted * fade + assumed * learning.weight
        return hits / (self.judged * fade + learning.weight)


def counted_drafts(proposed: int, accepted: int) -> int:
    """How many of a row's drafts count for acceptance: those after a rejected one
    do not.
    """
    return min(accepted + 1, proposed)


@frozen
class Costs:
    """The times of steps, in seconds. Raises ConfigError for invalid tables.

    Sizes above the largest one were not measured: no drafts are added to them.
    """

    # A forward of the target with at most this many inputs, and its seconds; both rising.
    verify: Table
    draft: float = _setting(0.0)  # a forward of the drafter, for one row
    # The cost of any drafts from the host, which prevent planning ahead.
    fixed: float = _setting(0.0)
    # The seconds by which a forward of the drafter takes longer for at most this
    # many rows; both rising. The last entry is used for more rows, too.
    draft_more: Table = ()
    # The cost of drafts beside prefill tokens, if they take a forward of their own.
    beside: float = _setting(0.0)

    def __attrs_post_init__(self) -> None:
        if not self.verify or self.verify[0][1] <= 0:
            raise ConfigError("speculation: costs must be pairs of numbers above 0")
        for table in (self.verify, self.draft_more):
            _check_table(table)

    def seconds(
        self, inputs: int, depth: int = 0, rows: int = 1, *, prompts: bool = False
    ) -> float:
        """The time of a step with `inputs` inputs, in which `rows` have up to `depth`
        drafts; infinite if that was not measured. `prompts`: some inputs are prefill
        tokens.
        """
        index = bisect_left(self.verify, (inputs, 0.0))
        if index == len(self.verify):
            return math.inf
        verified = self.verify[index][1]
        if not depth:
            return verified
        fixed = self.fixed + (self.beside if prompts else 0.0)
        return verified + depth * self.drafted(rows) + fixed

    def drafted(self, rows: int) -> float:
        """The time of a forward of the drafter for `rows` rows."""
        if not self.draft_more:
            return self.draft
        index = bisect_left(self.draft_more, (rows, 0.0))
        return self.draft + self.draft_more[min(index, len(self.draft_more) - 1)][1]


def _check_table(table: Table) -> None:
    sizes = [size for size, _ in table]
    seconds = [second_values for _, second_values in table]
    if any(size < 1 for size in sizes) or not all(
        0 <= second_values < math.inf for second_values in seconds
    ):
        raise ConfigError("speculation: costs must be pairs of numbers above 0")
    if sizes != sorted(set(sizes)) or seconds != sorted(seconds):
        raise ConfigError("speculation: costs must rise with sizes")
