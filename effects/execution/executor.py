"""What the driver asks of an executor, whatever it executes with."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from minfer.messages import Executed, Failed
from minfer.plan import Open, Plan, SampleApart

if TYPE_CHECKING:  # so that who only plans need not load it
    import numpy as np
    from numpy.typing import NDArray


class ExecutorError(RuntimeError):
    """A step could not be executed; the engine takes it back and goes on."""


class LogitsError(ExecutorError):
    """The model's logits for a request are not finite: there is nothing to
    sample from.
    """


class UnsupportedPlanError(ExecutorError):
    """A plan asks for something that this executor cannot do; it did nothing of it."""


def names_of(owners: Iterable[Open | None]) -> str:
    """The requests that rows were opened for, as errors name them."""
    names = [f"{one.name[0]!r} (sample {one.name[1]})" if one else "?" for one in owners]
    return ", ".join(names)


def not_finite(owners: Iterable[Open | None]) -> LogitsError:
    """The error that names the requests that these rows were opened for."""
    return LogitsError(
        f"the model's logits are not finite for request {names_of(owners)}"
    )


class Executor(Protocol):
    """Runs plans in order. `minfer.plan` states the contract."""

    def launch(self, plan: Plan) -> None:
        """Take a plan over; may return before it has run."""
        ...

    def mask_lines(self, step: int) -> "NDArray[np.int32] | None":
        """Memory [lines, words] for the masks of a plan that was taken over, if there is
        any to lend: at least a line for each of its rows apart, of a bit for each token
        id, the lowest first. Said before `sample`, once at most; what is written there
        need not be copied.
        """
        ...

    def sample(self, apart: SampleApart) -> None:
        """Sample the rows in `apart` of a plan that was taken over, with these masks.

        Said once for each plan that has such rows, before it is collected; steps that
        failed or that nobody knows are ignored.
        """
        ...

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan taken over and not yet collected, and return its
        results.
        """
        ...

    def close(self) -> None:
        """Let go of memory and devices; no call follows."""
        ...
