"""Makers of masks for tests: by a function of the plan, in time or as late as can be."""

from collections.abc import Callable
from concurrent.futures import Future

from minfer.effects.live.masks import Masked, NoMasks
from minfer.effects.text.grammars.lines import Lines, fill
from minfer.plan import Mask, Plan, Stand, lines_apart
from minfer.state import EngineState


class Waited(Future[Masked]):
    """Is done only once somebody waits for it."""

    def done(self) -> bool:
        return False


class MasksBy(NoMasks):
    """Asks a function, as soon as a plan was launched; `late`: the masks are not there
    before the plan's results are due; `lend`: they are written there; `stands`: how far
    they go behind drafts.
    """

    def __init__(
        self,
        make: Callable[[Plan], tuple[Mask, ...]],
        *,
        late: bool = False,
        lend: Callable[[int], Lines | None] | None = None,
        stands: Callable[[Plan], tuple[Stand, ...]] = lambda _: (),
    ) -> None:
        self.make = make
        self.stands = stands
        self.late = late
        self.lend = lend

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":  # noqa: ARG002  # the protocol's
        made: Future[Masked] = Waited() if self.late else Future()
        masks, stands = self.make(plan), self.stands(plan)
        lines = None if self.lend is None else self.lend(plan.step)
        if lines is None:
            made.set_result(Masked(masks, stands=stands))
        else:
            lines[:] = -1
            where = lines_apart(plan)
            for mask in masks:
                fill(lines[where[mask.index, mask.place]], mask.bits)
            made.set_result(Masked(written=True, stands=stands))
        return made
