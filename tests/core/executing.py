"""An oracle that counts what it is asked for: masks of some places only, and plans and
results in their wire form.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from attrs import frozen

from minfer.records.config import CacheGroup
from minfer.records.plan import (
    Draft,
    Mask,
    NewRow,
    Plan,
    SampleDeferred,
)
from minfer.records.plan_wire import plan_from, plan_to
from minfer.records.request import Request, row_sampling
from minfer.records.sequence import SampleId
from minfer.simulation.oracle import Oracle, OracleRow

MASKED: Final = 2**17  # tokens of a vocabulary, up to which masks are spelled out

Foresee = Callable[[SampleId], tuple[int, ...]]  # all tokens of a sample, to come as well


def opened(request: Request, table: tuple[int, ...] = (), sample: int = 0) -> NewRow:
    """A row, the first of a plan, that is opened for a request."""
    return NewRow(
        index=0,
        name=(request.id, sample),
        known=request.prompt + request.output,
        prompt=len(request.prompt),
        last_index=len(request.prompt) + request.max_tokens - 1,
        sampling=row_sampling(request, sample),
        tables=(table,),
    )


@frozen
class Habits:
    """How an executor of the worlds differs from the plain oracle."""

    wire: bool = False  # plans and results cross as bytes


class Busy(Oracle):
    """An oracle with habits. It counts what came of them in `seen`."""

    def __init__(
        self,
        habits: Habits,
        block_size: int,
        vocab: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        super().__init__(block_size, vocab, groups)
        self.habits = habits
        self.seen = Counter[str]()

    def launch(self, plan: Plan) -> None:
        """Queue the plan, and allow at once what is sampled apart."""
        super().launch(plan_from(plan_to(plan)) if self.habits.wire else plan)
        if plan.deferred:
            self.seen["sampled apart"] += 1
            drafts = sum(draft.index in plan.deferred for draft in plan.drafts)
            self.seen["drafts sampled apart"] += drafts
            # Of 2^31 tokens it is 256 MB; one without bits means the same.
            few = self.vocab <= MASKED
            everything = b"\xff" * (self.vocab // 8 + 1) if few else b""
            masks = (Mask(plan.deferred[0], everything),)
            reported = SampleDeferred(plan.step, masks)
            self.sample(reported)

    def _verified(
        self, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
    ) -> Iterator[int]:
        accepted = -1
        for token in super()._verified(row, start, draft, count, masks):
            accepted += 1
            yield token
        self.seen["drafts accepted"] += accepted > 0
        self.seen["drafts rejected"] += accepted < count
