"""What the driver asks of whoever makes masks for rows that are sampled apart."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from minfer.messages import Event, Finish, Pause
from minfer.plan import Mask, Plan
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition

if TYPE_CHECKING:
    from minfer.effects.text.grammars.lines import Lines


@frozen
class Masked:
    """What rows that are sampled apart may draw, and who of them is at its end."""

    masks: tuple[Mask, ...] = ()
    ends: tuple[Finish, ...] = ()
    # Whether the masks lie in the memory that was lent for them; then `masks` has none.
    written: bool = False


class MaskMaker(Protocol):
    """Who says what rows that are sampled apart may draw. In the driver's thread."""

    def listen(self, post: Callable[[Event], None]) -> None:
        """Learn how the engine is told that a mask is there; from any thread."""
        ...

    def write_to(self, lend: "Callable[[int], Lines | None]") -> None:
        """Learn where masks are to be written: memory for those of a step, if there is
        any.
        """
        ...

    def arrived(self, requests: Sequence[Request]) -> tuple[Pause, ...]:
        """Requests arrive; returns who may not be planned any further until its mask is
        there.
        """
        ...

    def turned(self, transition: Transition) -> None:
        """The engine has taken a turn."""
        ...

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        """Make the masks of a plan that was launched; `state` knows its rows, and all
        tokens before those that they are for.
        """
        ...

    def forget(self, samples: Iterable[SampleId]) -> None:
        """Let go of what is kept of samples that ended."""
        ...

    def close(self) -> None:
        """Let go of all."""
        ...


class NoMasks:
    """Every row may draw any token."""

    def listen(self, post: Callable[[Event], None]) -> None:
        """As `MaskMaker` says: there is nothing to tell."""

    def write_to(self, lend: "Callable[[int], Lines | None]") -> None:
        """As `MaskMaker` says: there are none."""

    def arrived(self, requests: Sequence[Request]) -> tuple[Pause, ...]:  # noqa: ARG002  # the protocol's
        """As `MaskMaker` says: nobody waits."""
        return ()

    def turned(self, transition: Transition) -> None:
        """As `MaskMaker` says: it does not matter."""

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":  # noqa: ARG002  # the protocol's
        """As `MaskMaker` says: at once."""
        return at_once(Masked())

    def forget(self, samples: Iterable[SampleId]) -> None:
        """As `MaskMaker` says: there is nothing."""

    def close(self) -> None:
        """As `MaskMaker` says: there is nothing."""


def lends_nothing(step: int) -> None:
    """No memory for the masks of a step."""


def at_once(masked: Masked) -> "Future[Masked]":
    """Masks that have been made."""
    made: Future[Masked] = Future()
    made.set_result(masked)
    return made
