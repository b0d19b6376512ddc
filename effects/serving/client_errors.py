"""Errors for clients, whatever their protocol and transport.

Every error becomes an `ApiError`, with a status of HTTP. Errors that clients may see keep
their text; all others become "internal error", and the log has more: no exception's text
leaves the server. The format of an `ApiError` depends on the protocol.
"""

from typing import Final

from attrs import frozen
from starlette.exceptions import HTTPException

from minfer.effects.live.errors import (
    CrashingRequestError,
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    TooLongError,
)
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.records.request import ParameterError

SHUTTING_DOWN: Final = "the server is shutting down"
CANCELLED: Final = "the request was cancelled"
ENGINE_STOPPED: Final = "the engine has stopped; the server's log says why"
INTERNAL: Final = 500
OVERLOADED: Final = "overloaded"
KILLED_ENGINE: Final = "request_killed_engine"  # read by `minfer route`
_RETRY_AFTER_SECONDS: Final = 1  # until a client should retry after a full queue


class ApiError(Exception):
    """An error in place of an answer; `param` is the field that was wrong.

    `retry_after`: seconds after which the same request may be served; None: not given,
    or, for a full queue, one second.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        full = retry_after is None and code == OVERLOADED
        self.retry_after = _RETRY_AFTER_SECONDS if full else retry_after


TOO_LONG: Final = "context_length_exceeded"


class ContextLengthError(ApiError):
    """The context does not hold a prompt and as much output as the field `param`
    requests; in tokens.
    """

    def __init__(
        self, prompt: int, requested: int, context: int, place: str, param: str
    ) -> None:
        # Programs search for the first two sentences, which are OpenAI's.
        reason = (
            f"This model's maximum context length is {context} tokens. However, you "
            f"requested {prompt + requested} tokens ({prompt} in the {place}, "
            f"{requested} in the completion)."
        )
        remedy = f"Shorten the {place}, or lower {param} to {context - prompt}"
        super().__init__(f"{reason} {remedy}", param, TOO_LONG)
        self.prompt = prompt
        self.requested = requested
        self.context = context


@frozen
class _ErrorClass:
    """The class of an error that clients may see."""

    code: str | None
    status: int


_ERROR_CLASSES: Final[dict[type[Exception], _ErrorClass]] = {
    RequestError: _ErrorClass(None, 400),
    TooLongError: _ErrorClass(TOO_LONG, 400),
    OverloadedError: _ErrorClass(OVERLOADED, 503),
    CrashingRequestError: _ErrorClass(KILLED_ENGINE, 400),
    EngineDeadError: _ErrorClass("engine_dead", 503),
    DrainingError: _ErrorClass("engine_dead", 503),
    ParameterError: _ErrorClass(None, 400),
    ChatTemplateError: _ErrorClass(None, 400),
}


# Of engines that are dead; others contain exceptions, which are not for clients.
_PUBLIC_REASONS: Final = frozenset({SHUTTING_DOWN, CANCELLED})


def to_api_error(error: Exception, prompt_field: str | None = None) -> ApiError:
    """The client's error for an error; `prompt_field` is the field with its prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code)
    error_class = _ERROR_CLASSES.get(type(error))
    if error_class is None:
        return ApiError("internal error", status=INTERNAL)
    if type(error) is EngineDeadError and str(error) not in _PUBLIC_REASONS:
        return ApiError(ENGINE_STOPPED, None, error_class.code, error_class.status)
    param_name = getattr(error, "param", None) or prompt_field
    param = param_name if error_class.status == 400 else None
    return ApiError(str(error), param, error_class.code, error_class.status)
