"""Plans of an engine with pipeline stages, cut into micro-batches.

Theory. A row's next token is its next input, so the first stage can begin a row's next
step only after the last one has ended this step: of one batch, all stages but one wait.
So rows are in as many *micro-batches* as there are stages (Huang et al. 2019), by the
number of their device row, always in the same one. While the second stage computes one
micro-batch, the first computes the next.

    stage 0   a0 b0 a1 b1 a2 b2     steps 0, 1, 2 of the micro-batches a and b
    stage 1      a0 b0 a1 b1 a2 b2

A plan becomes a plan for each micro-batch that has rows in it, and results are put
together again; so neither the engine nor the executor of a rank knows of it. Plan n of
micro-batch i of m has the number n * m + i.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from minfer.effects.execution.contract import Executor, OtherRanks, crew_of
from minfer.records.messages import Executed, Failed, Lost, Moved, TransferCommand
from minfer.records.plan import Copy, Mask, Plan, SampleDeferred

WORD: Final = 32  # tokens in a word of a mask


@frozen
class MicroBatch:
    """A part of a plan, and which entries of the plan's columns are in it."""

    plan: Plan
    entries: tuple[int, ...]


def micro_batches(plan: Plan, count: int) -> tuple[MicroBatch, ...]:
    """Returns the parts of a plan that have rows, in order."""
    found = (
        _part(plan, number, count)
        for number in range(count)
        if any(row % count == number for row in plan.rows)
    )
    return tuple(found)


def _part(plan: Plan, number: int, count: int) -> MicroBatch:
    """Returns the part of the rows that are in a micro-batch."""
    entries = tuple(i for i, row in enumerate(plan.rows) if row % count == number)
    place = {entry: at for at, entry in enumerate(entries)}

    def columns(column: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(column[entry] for entry in entries)

    opens = tuple(one for one in plan.opens if one.index in place)
    part = Plan(
        step=plan.step * count + number,
        run_ids=columns(plan.run_ids),
        rows=columns(plan.rows),
        starts=columns(plan.starts),
        num_scheduled_tokens=columns(plan.num_scheduled_tokens),
        max_sampled_tokens=columns(plan.max_sampled_tokens),
        fills=tuple(
            evolve(one, index=place[one.index])
            for one in plan.fills
            if one.index in place
        ),
        opens=tuple(evolve(one, index=place[one.index]) for one in opens),
        grows=tuple(one for one in plan.grows if one.row % count == number),
        copies=_copies(plan, number, count),
        deferred=tuple(place[entry] for entry in plan.deferred if entry in place),
    )
    return MicroBatch(part, entries)


def _copies(plan: Plan, number: int, count: int) -> tuple[Copy, ...]:
    """Returns the copies of a micro-batch: those to blocks of rows that it opens; the
    first one that has rows also has all that are to no opened row.
    """
    owners = {
        block: plan.rows[one.index] % count
        for one in plan.opens
        for table in one.tables
        for block in table
    }
    first = min(row % count for row in plan.rows)
    return tuple(one for one in plan.copies if owners.get(one.target, first) == number)


def together(plan: Plan, parts: Sequence[tuple[MicroBatch, Executed]]) -> Executed:
    """Returns the results of a plan, of those of its parts."""
    size = len(plan.rows)
    yields = [()] * size  # type: list[tuple[int, ...]]
    logprobs = [()] * size  # type: list[object]
    pooled = [b""] * size
    scored = any(done.logprobs for _, done in parts)
    vectors = any(done.pooled for _, done in parts)
    for part, done in parts:
        for at, entry in enumerate(part.entries):
            yields[entry] = done.yields[at]
            if done.logprobs:
                logprobs[entry] = done.logprobs[at]
            if done.pooled:
                pooled[entry] = done.pooled[at]
    return Executed(
        plan.step,
        tuple(yields),
        tuple(logprobs) if scored else (),  # type: ignore[arg-type]  # as the parts had
        tuple(pooled) if vectors else (),
    )


@define(eq=False)
class Launched:
    """A plan, and its parts."""

    plan: Plan
    parts: tuple[MicroBatch, ...]
    # of rows with deferred sampling, if they were lent: [lines, words]
    masks: "NDArray[np.int32] | None" = None


@define(eq=False)
class MicroBatchExecutor:
    """Runs the micro-batches of plans on another executor."""

    inner: Executor
    count: int
    vocab: int
    launched: deque[Launched] = field(factory=deque)

    @property
    def crew(self) -> OtherRanks | None:
        """The other ranks, as the inner executor has them."""
        return crew_of(self.inner)

    def launch(self, plan: Plan) -> None:
        """See `Executor.launch`."""
        parts = micro_batches(plan, self.count)
        self.launched.append(Launched(plan, parts))
        for part in parts:
            self.inner.launch(part.plan)

    def mask_lines(self, step: int) -> "NDArray[np.int32] | None":
        """See `Executor.mask_lines`."""
        for one in self.launched:
            if one.plan.step == step:
                shape = len(one.plan.deferred), -(-self.vocab // WORD)
                one.masks = np.zeros(shape, np.int32)
                return one.masks
        return None

    def sample(self, command: SampleDeferred) -> None:
        """See `Executor.sample`."""
        one = next((o for o in self.launched if o.plan.step == command.step), None)
        if one is None:
            return
        masks = {mask.index: mask.bits for mask in command.masks}
        if command.written and one.masks is not None:
            lines = zip(one.plan.deferred, one.masks, strict=True)
            masks = {index: line.tobytes() for index, line in lines}
        for part in one.parts:
            if part.plan.deferred:
                bits = (
                    Mask(at, masks[part.entries[at]])
                    for at in part.plan.deferred
                    if part.entries[at] in masks
                )
                self.inner.sample(SampleDeferred(part.plan.step, tuple(bits)))

    def move(
        self, command: TransferCommand, report: Callable[[Moved | Lost], None]
    ) -> None:
        """See `Executor.move`."""
        self.inner.move(command, report)

    def collect(self) -> Executed | Failed:
        """See `Executor.collect`."""
        one = self.launched.popleft()
        done = list[tuple[MicroBatch, Executed]]()
        for part in one.parts:
            result = self.inner.collect()
            if isinstance(result, Failed):
                self.launched.clear()
                return Failed(one.plan.step, result.error)
            done.append((part, result))
        return together(one.plan, done)

    def close(self) -> None:
        """See `Executor.close`."""
        self.inner.close()
