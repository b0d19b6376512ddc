"""The format of an error in Anthropic's API, and its kinds by status."""

import json
from collections.abc import Mapping
from typing import Final

from minfer.effects.serving.client_errors import (
    INTERNAL,
    KILLED_ENGINE,
    TOO_LONG,
    ApiError,
    ContextLengthError,
)
from minfer.effects.serving.wire.transport import Failure, StreamEvent

_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def failure(error: ApiError) -> Failure:
    """An error in the format of Anthropic's API; in a stream it is an event "error"."""
    default_kind = "invalid_request_error" if error.status < INTERNAL else "api_error"
    kind = _KINDS.get(error.status, default_kind)
    fields = {"type": kind, "message": _message(error)}
    if error.code == KILLED_ENGINE:  # which Anthropic's API has no type for
        fields["code"] = error.code
    body = {"type": "error", "error": fields}
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Failure(error.status, StreamEvent(data, "error"), error.retry_after)


def _message(error: ApiError) -> str:
    """The message; programs search it for Anthropic's own words and numbers."""
    if isinstance(error, ContextLengthError):
        sizes = f"{error.prompt} + {error.requested} > {error.context}"
        return (
            f"input length and `max_tokens` exceed context limit: {sizes}, decrease "
            f"input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error}" if error.code == TOO_LONG else str(error)
