"""What the driver asks of an executor, whatever it executes with."""

from typing import Protocol

from minfer.messages import Executed, Failed
from minfer.plan import Plan


class ExecutorError(RuntimeError):
    """A step could not be executed; the engine takes it back and goes on."""


class Executor(Protocol):
    """Runs plans in order. `minfer.plan` states the contract."""

    def launch(self, plan: Plan) -> None:
        """Take a plan over; may return before it has run."""
        ...

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan taken over and not yet collected, and return its results."""
        ...

    def close(self) -> None:
        """Let go of memory and devices; no call follows."""
        ...
