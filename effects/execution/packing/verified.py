"""Rows with drafts, on the host: from a plan's drafts to the accepted tokens.

Theory. A row that has drafts is a decode row, and comes before those without. Its drafts
are further inputs, each in a line of its own. To attention they are decode rows whose
context ends with themselves, as all KV of a step is written before any of it is read; or,
on a GPU, one chunk of a row, which reads the context once (`VerifiedRows` in
models/architecture/batch.py). Then places are verified one after the other
(speculative_step.py): each samples by the usual sampler, with the noise of its position,
and with the penalties of the tokens before it. So a row yields the same tokens as without
drafts, whatever its sampling parameters; and all is launched in order, so that a graph
can hold it. Under the rule "rejection", coins accept a draft or replace it
(rejection_sampling.py), and only the distribution of a row's tokens is the same.

Rows with fewer drafts than others fill their lines with the scratch row. So there are few
shapes of such steps, but a row with many drafts beside many with one costs more than it
has to.

Rows with deferred sampling (deferred_sampling.py) have no drafts.
"""

from collections.abc import Iterator, Sequence

from attrs import frozen

from minfer.effects.execution.device.device_rows import DeviceRows, Words
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.records.config import EngineConfig
from minfer.records.plan import Draft, NewRow, Plan
from minfer.records.speculation import DEVICE, Speculation
from minfer.values.checks import ConfigError


def check_speculation(config: EngineConfig, *, has_drafter: bool) -> None:
    """Refuse a speculation that cannot be executed. Raises ConfigError."""
    speculation = config.speculation
    if speculation is None:
        return
    if speculation.drafter == DEVICE and not has_drafter:
        raise ConfigError(
            f"speculation: for the drafter {DEVICE!r} a draft model or a draft head has "
            f"to be loaded"
        )


def unsupported_drafts(
    plan: Plan,
    speculation: Speculation | None,
    rows: DeviceRows,
    room: int,
    *,
    has_drafter: bool,
) -> str:
    """Returns why a plan's drafts cannot be verified, or nothing. `room` is the most
    drafts, counting as many for each row as the row with the most has.
    """
    if not plan.drafts:
        return ""
    if speculation is None:
        return "drafts are not expected, as the configuration has no speculation"
    filled = {fill.index for fill in plan.fills}
    for draft in plan.drafts:
        count = plan.num_scheduled_tokens[draft.index] - 1
        if draft.index in plan.deferred:
            return "rows with deferred sampling have no drafts"
        if draft.index in filled:
            return "rows with drafts are decode rows"
        if not 0 < count <= speculation.drafts:
            return f"rows have 1 to {speculation.drafts} drafts, not {count}"
        if draft.tokens and len(draft.tokens) != count:
            return f"{len(draft.tokens)} drafts are given of {count}"
        if not (draft.tokens or has_drafter):
            return "drafts are not given, and there is no drafter to make them"
        if not _owner_drafts(rows.owners[plan.rows[draft.index]]):
            return "rows that are pooled have no drafts"
    if len(plan.drafts) * max_drafts_of(plan) > room:
        requested = f"{len(plan.drafts)} rows with up to {max_drafts_of(plan)} drafts"
        return f"there is room for {room} drafts, not for {requested}"
    return ""


def _owner_drafts(owner: NewRow | None) -> bool:
    """Returns whether a row's owner, from before the plan, can have drafts."""
    return owner is None or not owner.pooling


@frozen(eq=False)
class DraftOutputs:
    """Where the tokens sampled behind drafts are: after all other lines, a line of rows
    for each place, then the number of tokens of each row.
    """

    entries: list[int]  # entries of the plan
    owners: list[NewRow | None]
    first: int
    stride: int  # lines between two places
    drafts: int
    verified: int  # rows of each place

    @classmethod
    def of(
        cls, shape: StepShape, entries: list[int], owners: list[NewRow | None]
    ) -> "DraftOutputs":
        """Returns the results' layout for a step of this shape, and rows with these
        entries.
        """
        first = shape.draft_line(0)
        stride = shape.draft_line(1) - first
        return cls(entries, owners, first, stride, shape.drafts, shape.verified)

    @property
    def end(self) -> int:
        """The end of all lines."""
        return self.first + (self.drafts + 1) * self.stride

    def accepted_lines(
        self, drawn: Sequence[int]
    ) -> Iterator[tuple[int, NewRow | None, range]]:
        """Yields each row's lines of accepted places, given all lines."""
        counts = self.first + self.drafts * self.stride
        for v, (entry, owner) in enumerate(zip(self.entries, self.owners, strict=True)):
            begin = self.first + v
            end = begin + drawn[counts + v] * self.stride
            yield entry, owner, range(begin, end, self.stride)


def max_drafts_of(plan: Plan) -> int:
    """Returns the most drafts that a row of a plan has."""
    return max(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)


def drafted_first(drafts: Sequence[Draft], entries: Sequence[int]) -> list[int]:
    """Returns entries of a plan, those with drafts before the others."""
    drafted = {draft.index for draft in drafts}
    drafted_entries = [i for i in entries if i in drafted]
    if not drafted_entries:
        return [*entries]
    return [*drafted_entries, *(i for i in entries if i not in drafted)]


def write_drafts(plan: Plan, entries: Sequence[int], into: DraftWords[Words]) -> None:
    """Write the drafts of the rows with these entries, in order."""
    draft_tokens = {draft.index: draft.tokens for draft in plan.drafts}
    for v, entry in enumerate(entries):
        count = plan.num_scheduled_tokens[entry] - 1
        into.counts[v] = count
        into.tokens[:count, v] = draft_tokens[entry] or -1
