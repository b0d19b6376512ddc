"""What the driver asks of an executor, whatever it executes with."""

from collections.abc import Iterable
from typing import Protocol

from minfer.messages import Executed, Failed
from minfer.plan import Open, Plan


class ExecutorError(RuntimeError):
    """A step could not be executed; the engine takes it back and goes on."""


class LogitsError(ExecutorError):
    """The model's logits for a request are not finite: there is nothing to
    sample from.
    """


def not_finite(seats: Iterable[Open | None]) -> LogitsError:
    """The error that names the requests in these seats."""
    names = [f"{one.name[0]!r} (sample {one.name[1]})" if one else "?" for one in seats]
    return LogitsError(
        f"the model's logits are not finite for request {', '.join(names)}"
    )


class Executor(Protocol):
    """Runs plans in order. `minfer.plan` states the contract."""

    def launch(self, plan: Plan) -> None:
        """Take a plan over; may return before it has run."""
        ...

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan taken over and not yet collected, and return its
        results.
        """
        ...

    def close(self) -> None:
        """Let go of memory and devices; no call follows."""
        ...
