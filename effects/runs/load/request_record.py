"""One request as its client measured it: the times of its sending, its texts, its end."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from minfer.values.checks import ConfigError
from minfer.values.texts import without_breaks

INTERRUPTED: Final = "interrupted"  # by this client: no failure of the server
_LONGEST: Final = 300  # characters of a message


class LoadError(ConfigError):
    """A load that is impossible; the message has the reason and the remedy."""


class ReplyError(Exception):
    """A wrong answer; similar failures have the same `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@frozen
class RequestFailure:
    """Why a request failed."""

    kind: str  # the same for similar failures
    message: str


@frozen
class RequestRecord:
    """One request. Times are seconds since the load began."""

    number: int  # its place in the load
    due: float  # when it was to be sent
    sent: float
    ended: float  # when its last text came, or it failed
    events: Sequence[float] = ()  # when each event with text came
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False  # output tokens are events, as the server sent no usage
    failure: RequestFailure | None = None

    @property
    def completed(self) -> bool:
        """Whether the whole answer was received."""
        return self.failure is None

    @property
    def interrupted(self) -> bool:
        """Whether this client cancelled it before its end."""
        return self.failure is not None and self.failure.kind == INTERRUPTED

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return self.events[0] - self.sent if self.events else None

    @property
    def e2el(self) -> float:
        """Seconds to the last text."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        if not self.events or self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)


def one_line(text: str) -> str:
    """A server's message, fit for one line of a terminal."""
    shown = without_breaks(text)[:_LONGEST]
    return "".join(c if c.isprintable() else "?" for c in shown)
