"""Makers of masks for tests: by a function of the plan, in time or as late as can be."""

from collections.abc import Callable
from concurrent.futures import Future

from minfer.effects.live.masks import NoMasks, StepMasks
from minfer.effects.text.grammars.mask_lines import Lines, fill
from minfer.records.plan import Mask, Plan
from minfer.records.state import EngineState


class Waited(Future[StepMasks]):
    """Is done only once it is waited for."""

    def done(self) -> bool:
        return False


class MasksBy(NoMasks):
    """Asks a function, as soon as a plan was launched; `late`: the masks are not there
    before the plan's results are due; `lend`: they are written there.
    """

    def __init__(
        self,
        make: Callable[[Plan], tuple[Mask, ...]],
        *,
        late: bool = False,
        lend: Callable[[int], Lines | None] | None = None,
    ) -> None:
        self.make = make
        self.late = late
        self.lend = lend

    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":  # noqa: ARG002  # the protocol's
        future: Future[StepMasks] = Waited() if self.late else Future()
        masks = self.make(plan)
        lines = None if self.lend is None else self.lend(plan.step)
        if lines is None:
            future.set_result(StepMasks(masks))
        else:
            lines[:] = -1
            for mask in masks:
                fill(lines[plan.deferred.index(mask.index)], mask.bits)
            future.set_result(StepMasks(written=True))
        return future
