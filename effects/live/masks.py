"""The driver's interface to mask makers, for rows with deferred sampling."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from attrs import frozen
from typing_extensions import override

from minfer.records.messages import Event, Finish, Pause
from minfer.records.plan import Mask, Plan
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition

if TYPE_CHECKING:
    from minfer.effects.text.grammars.mask_lines import Lines


@frozen
class StepMasks:
    """The tokens that deferred rows may sample, and the samples that end."""

    masks: tuple[Mask, ...] = ()
    ends: tuple[Finish, ...] = ()
    # Whether the masks are in the memory that was lent for them; then `masks` has none.
    written: bool = False


class MaskMaker(Protocol):
    """Makes the masks of rows with deferred sampling. In the driver's thread."""

    def listen(self, post: Callable[[Event], None]) -> None:
        """Set the function that posts events to the engine when a mask is ready; from any
        thread.
        """
        ...

    def use_memory(self, lend: "Callable[[int], Lines | None]") -> None:
        """Set the function that lends memory for the masks of a step, if there is any."""
        ...

    def add_requests(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """Note new requests; returns pauses of samples that must not be planned before
        their mask is ready.
        """
        ...

    def observe(self, transition: Transition) -> None:
        """Note the engine's transition."""
        ...

    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":
        """Make the masks of a launched plan; `state` has its rows, and all tokens before
        those that the masks are for.
        """
        ...

    def drop(self, samples: Iterable[SampleId]) -> None:
        """Drop the state of samples that ended."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class NoMasks(MaskMaker):
    """A `MaskMaker` without masks: every row may sample any token."""

    @override
    def listen(self, post: Callable[[Event], None]) -> None:
        """No events are posted."""

    @override
    def use_memory(self, lend: "Callable[[int], Lines | None]") -> None:
        """No masks are written."""

    @override
    def add_requests(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """No sample is paused."""
        return ()

    @override
    def observe(self, transition: Transition) -> None:
        """Ignored."""

    @override
    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":
        """At once."""
        return ready_masks(StepMasks())

    @override
    def drop(self, samples: Iterable[SampleId]) -> None:
        """There is no state."""

    @override
    def close(self) -> None:
        """There is nothing to release."""


def no_memory(step: int) -> None:
    """Returns no memory for the masks of a step."""


def ready_masks(masked: StepMasks) -> "Future[StepMasks]":
    """Returns a future of masks that are ready."""
    future: Future[StepMasks] = Future()
    future.set_result(masked)
    return future
