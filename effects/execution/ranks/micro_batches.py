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

A plan's copies come before its saves of states, which may overwrite what the copies read.
So a kept state that a save overwrites is copied with the first micro-batch, whichever row
starts from it: the working state that it is copied to is nobody's until then.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from minfer.effects.execution.contract import (
    Executor,
    OtherRanks,
    ReportLoad,
    adapter_executor,
    workers_of,
)
from minfer.records.messages import (
    Executed,
    Failed,
    LoadAdapter,
    Lost,
    Moved,
    TransferCommand,
)
from minfer.records.plan import Copy, Mask, Plan, SampleDeferred

TOKENS_PER_WORD: Final = 32  # tokens in a word of a mask


@frozen
class MicroBatch:
    """A part of a plan, and which entries of the plan's columns are in it."""

    plan: Plan
    entries: tuple[int, ...]


def micro_batches(plan: Plan, count: int) -> tuple[MicroBatch, ...]:
    """Returns the parts of a plan that have rows, in order."""
    batches = (
        _micro_batch(plan, number, count)
        for number in range(count)
        if any(row % count == number for row in plan.rows)
    )
    return tuple(batches)


def _micro_batch(plan: Plan, number: int, count: int) -> MicroBatch:
    """Returns the part of the rows that are in a micro-batch."""
    entries = tuple(i for i, row in enumerate(plan.rows) if row % count == number)
    indices = {entry: index for index, entry in enumerate(entries)}

    def columns(column: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(column[entry] for entry in entries)

    opens = tuple(opened for opened in plan.opens if opened.index in indices)
    micro_plan = Plan(
        step=plan.step * count + number,
        run_ids=columns(plan.run_ids),
        rows=columns(plan.rows),
        starts=columns(plan.starts),
        num_scheduled_tokens=columns(plan.num_scheduled_tokens),
        max_sampled_tokens=columns(plan.max_sampled_tokens),
        fills=tuple(
            evolve(fill, index=indices[fill.index])
            for fill in plan.fills
            if fill.index in indices
        ),
        opens=tuple(evolve(opened, index=indices[opened.index]) for opened in opens),
        grows=tuple(grow for grow in plan.grows if grow.row % count == number),
        copies=_copies(plan, number, count),
        deferred=tuple(indices[entry] for entry in plan.deferred if entry in indices),
        saves=tuple(
            evolve(save, index=indices[save.index])
            for save in plan.saves
            if save.index in indices
        ),
    )
    return MicroBatch(micro_plan, entries)


def _copies(plan: Plan, number: int, count: int) -> tuple[Copy, ...]:
    """Returns the copies of a micro-batch: those to blocks of rows that it opens; the
    first one that has rows also has all that are to no opened row, or from pages that a
    save of the plan overwrites.
    """
    owners = {
        block: plan.rows[opened.index] % count
        for opened in plan.opens
        for table in opened.tables
        for block in table
    }
    first = min(row % count for row in plan.rows)
    overwritten = {page for save in plan.saves for page in save.pages}

    def carrier(copy: Copy) -> int:
        """Returns the micro-batch that copies."""
        return first if copy.source in overwritten else owners.get(copy.target, first)

    return tuple(copy for copy in plan.copies if carrier(copy) == number)


def merge_results(plan: Plan, results: Sequence[tuple[MicroBatch, Executed]]) -> Executed:
    """Returns the results of a plan, of those of its parts."""
    size = len(plan.rows)
    yields = [()] * size  # type: list[tuple[int, ...]]
    logprobs = [()] * size  # type: list[object]
    pooled = [b""] * size
    scored = any(executed.logprobs for _, executed in results)
    vectors = any(executed.pooled for _, executed in results)
    for batch, executed in results:
        for index, entry in enumerate(batch.entries):
            yields[entry] = executed.yields[index]
            if executed.logprobs:
                logprobs[entry] = executed.logprobs[index]
            if executed.pooled:
                pooled[entry] = executed.pooled[index]
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
    batches: tuple[MicroBatch, ...]
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
    def workers(self) -> OtherRanks | None:
        """The other ranks, as the inner executor has them."""
        return workers_of(self.inner)

    def launch(self, plan: Plan) -> None:
        """See `Executor.launch`."""
        batches = micro_batches(plan, self.count)
        self.launched.append(Launched(plan, batches))
        for batch in batches:
            self.inner.launch(batch.plan)

    def mask_lines(self, step: int) -> "NDArray[np.int32] | None":
        """See `Executor.mask_lines`."""
        for launched in self.launched:
            if launched.plan.step == step:
                shape = len(launched.plan.deferred), -(-self.vocab // TOKENS_PER_WORD)
                launched.masks = np.zeros(shape, np.int32)
                return launched.masks
        return None

    def sample(self, command: SampleDeferred) -> None:
        """See `Executor.sample`."""
        launched = next(
            (
                candidate
                for candidate in self.launched
                if candidate.plan.step == command.step
            ),
            None,
        )
        if launched is None:
            return
        masks = {mask.index: mask.bits for mask in command.masks}
        if command.written and launched.masks is not None:
            lines = zip(launched.plan.deferred, launched.masks, strict=True)
            masks = {index: line.tobytes() for index, line in lines}
        for batch in launched.batches:
            if batch.plan.deferred:
                bits = (
                    Mask(index, masks[batch.entries[index]])
                    for index in batch.plan.deferred
                    if batch.entries[index] in masks
                )
                self.inner.sample(SampleDeferred(batch.plan.step, tuple(bits)))

    def move(
        self, command: TransferCommand, report: Callable[[Moved | Lost], None]
    ) -> None:
        """See `Executor.move`."""
        self.inner.move(command, report)

    def add_adapter(self, digest: bytes, folder: str) -> None:
        """As `AdapterExecutor` says."""
        adapter_executor(self.inner).add_adapter(digest, folder)

    def remove_adapter(self, digest: bytes) -> None:
        """As `AdapterExecutor` says."""
        adapter_executor(self.inner).remove_adapter(digest)

    def load_adapter(self, command: LoadAdapter, report: ReportLoad) -> None:
        """As `AdapterExecutor` says."""
        adapter_executor(self.inner).load_adapter(command, report)

    def collect(self) -> Executed | Failed:
        """See `Executor.collect`."""
        launched = self.launched.popleft()
        results = list[tuple[MicroBatch, Executed]]()
        for batch in launched.batches:
            result = self.inner.collect()
            if isinstance(result, Failed):
                self.launched.clear()
                return Failed(launched.plan.step, result.error)
            results.append((batch, result))
        return merge_results(launched.plan, results)

    def close(self) -> None:
        """See `Executor.close`."""
        self.inner.close()
