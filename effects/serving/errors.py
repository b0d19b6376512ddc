"""What a client is told instead of an answer, whatever its protocol and transport.

Everything that can go wrong becomes an `ApiError`, with a status out of HTTP's. Errors of
which clients may know keep their words; anything else is "internal error", and the log
says more. How an `ApiError` is spelled is the protocol's business.
"""

from typing import Final

from attrs import frozen
from starlette.exceptions import HTTPException

from minfer.effects.live.errors import (
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    TooLongError,
)
from minfer.effects.text.chat import ChatTemplateError
from minfer.request import ParameterError

SHUTTING_DOWN: Final = "the server is shutting down"
INTERNAL: Final = 500
_OVERLOADED: Final = "overloaded"
_RETRY_AFTER: Final = 1  # seconds after which who met a full line may come again


class ApiError(Exception):
    """What a client is told instead of an answer; `param` is the field that was wrong."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    @property
    def retry_after(self) -> int | None:
        """Seconds after which the same request may be served; None: it says nothing."""
        return _RETRY_AFTER if self.code == _OVERLOADED else None


@frozen
class _Told:
    """How an error that clients are told of is classed."""

    code: str | None
    status: int


_TOLD: Final[dict[type[Exception], _Told]] = {
    RequestError: _Told(None, 400),
    TooLongError: _Told("context_length_exceeded", 400),
    OverloadedError: _Told(_OVERLOADED, 503),
    EngineDeadError: _Told("engine_dead", 503),
    DrainingError: _Told("engine_dead", 503),
    ParameterError: _Told(None, 400),
    ChatTemplateError: _Told(None, 400),
}


def told_of(error: Exception, prompt_field: str | None = None) -> ApiError:
    """What a client is told of an error; `prompt_field` is the field its prompt is in."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code)
    known = _TOLD.get(type(error))
    if known is None:
        return ApiError("internal error", status=INTERNAL)
    named = getattr(error, "param", None) or prompt_field
    param = named if known.status == 400 else None
    return ApiError(str(error), param, known.code, known.status)
