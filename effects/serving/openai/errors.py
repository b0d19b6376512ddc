"""The shape of an error in OpenAI's API."""

import json

from minfer.effects.serving.errors import INTERNAL, ApiError
from minfer.effects.serving.transports.transport import Event, Failure


def failure(error: ApiError) -> Failure:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if error.status < INTERNAL else "server_error"
    about = {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    said = json.dumps({"error": about}, ensure_ascii=False, separators=(",", ":"))
    return Failure(error.status, Event(said), error.retry_after)
