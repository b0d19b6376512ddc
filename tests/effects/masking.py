"""Makers of masks for tests: by a function of the plan, in time or as late as can be."""

from collections.abc import Callable
from concurrent.futures import Future

from minfer.effects.live.masks import Masked, NoMasks
from minfer.plan import Mask, Plan
from minfer.state import EngineState


class Waited(Future[Masked]):
    """Is done only once somebody waits for it."""

    def done(self) -> bool:
        return False


class MasksBy(NoMasks):
    """Asks a function, as soon as a plan was launched; `late`: the masks are not there
    before the plan's results are due.
    """

    def __init__(
        self, make: Callable[[Plan], tuple[Mask, ...]], *, late: bool = False
    ) -> None:
        self.make = make
        self.late = late

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":  # noqa: ARG002  # the protocol's
        made: Future[Masked] = Waited() if self.late else Future()
        made.set_result(Masked(self.make(plan)))
        return made
