"""The attempts to have one request answered by some backend."""

from typing import Final

from attrs import define, field

from minfer.effects.cluster.link.crash_rule import MAX_ENDED_BACKENDS
from minfer.effects.proxy.backend_dispatcher import (
    NO_BACKEND,
    NotPlacedError,
    TooManyWaitingError,
)
from minfer.effects.proxy.forwarding import (
    DISCONNECTED,
    SILENT,
    BackendFailure,
    BackendRefusal,
)
from minfer.effects.serving.client_errors import OVERLOADED, ApiError

UNAVAILABLE: Final = 503
_RETRY_AFTER_SECONDS: Final = 1  # until a client should try again


def not_placed_error(error: NotPlacedError) -> ApiError:
    """Returns the answer to a request that the dispatcher has refused."""
    code = OVERLOADED if isinstance(error, TooManyWaitingError) else "no_backend"
    return ApiError(str(error), None, code, UNAVAILABLE, _RETRY_AFTER_SECONDS)


def no_backend_error() -> ApiError:
    """Returns the error while no backend takes requests."""
    return not_placed_error(NotPlacedError(NO_BACKEND))


@define
class Attempts:
    """The results of the attempts so far."""

    allowed: tuple[str, ...] | None = None  # backends that have its model; None: all
    tried: list[str] = field(factory=list)  # backends
    num_ended: int = 0  # of these, which closed the connection or fell silent
    refused: BackendRefusal | None = None  # the last refusal
    error: ApiError = field(factory=no_backend_error)  # of the last that failed

    def note(self, outcome: BackendFailure | BackendRefusal) -> bool:
        """Note an attempt; returns whether another backend may be tried after it."""
        if isinstance(outcome, BackendRefusal):
            is_first, self.refused = self.refused is None, outcome
            return is_first
        self.error = outcome.error
        self.num_ended += outcome.cause in (DISCONNECTED, SILENT)
        return outcome.may_retry and self.num_ended < MAX_ENDED_BACKENDS

    @property
    def may_move(self) -> bool:
        """Whether another backend may be tried if the present one falls silent."""
        return self.num_ended + 1 < MAX_ENDED_BACKENDS
