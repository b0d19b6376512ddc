"""What callers are told: requests that cannot be served, engines that serve nobody."""

from typing import Final

PROGRAM_ENDS: Final = (
    "the program's main thread has ended; let it wait for those who still ask"
)


class RequestError(ValueError):
    """A request cannot be served: that at `index` of its list, because of its field
    `param`.
    """

    def __init__(self, message: str, index: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.param = param


class TooLongError(RequestError):
    """The context or the cache cannot hold prompt and output, whoever else is served."""


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


class EngineDeadError(RuntimeError):
    """The engine is closed, or broke; it serves nobody any more."""


class DrainingError(EngineDeadError):
    """The engine finishes what it serves, and takes nothing new."""
