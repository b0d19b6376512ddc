"""One request as its client saw it: when it was sent, when text came, how it ended."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from minfer.setting import ConfigError

INTERRUPTED: Final = "interrupted"  # by us: no fault of the server's
_LONGEST: Final = 300  # characters of a message


class LoadError(ConfigError):
    """A load that cannot be put on a server: what is wrong, and what to do about it."""


@frozen
class Failure:
    """Why a request failed."""

    kind: str  # the same for all that failed alike
    message: str


@frozen
class Record:
    """One request. Times are seconds since the load began."""

    number: int  # its place in the load
    due: float  # when it was to be sent
    sent: float
    ended: float  # when its last text came, or it failed
    events: Sequence[float] = ()  # when each event with text came; none without a stream
    tokens: Sequence[int] = ()  # of each event, if the server said so; else empty
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False  # output tokens are events: the server told no usage
    failure: Failure | None = None

    @property
    def good(self) -> bool:
        """Whether it was answered to its end."""
        return self.failure is None

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
    """What a server said, fit for one line of a terminal."""
    shown = " ".join(text.split())[:_LONGEST]
    return "".join(c if c.isprintable() else "?" for c in shown)
