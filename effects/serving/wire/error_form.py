"""The format of an error in OpenAI's API."""

import json

import attrs

from minfer.effects.serving.client_errors import INTERNAL, ApiError
from minfer.effects.serving.wire.transport import Failure, StreamEvent


def failure(error: ApiError) -> Failure:
    """An error in the format of OpenAI's API."""
    kind = "invalid_request_error" if error.status < INTERNAL else "server_error"
    fields = {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    data = json.dumps({"error": fields}, ensure_ascii=False, separators=(",", ":"))
    return Failure(error.status, StreamEvent(data), error.retry_after)


def stream_failure(error: ApiError) -> Failure:
    """Likewise, where the events of a stream have names: it is one called "error"."""
    data = failure(error)
    return attrs.evolve(data, event=attrs.evolve(data.event, name="error"))
