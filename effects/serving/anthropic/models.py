"""GET /v1/models in Anthropic's format, which its clients select by a header.

OpenAI's clients use the same address, without that header.
"""

from datetime import UTC, datetime
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from minfer.effects.serving.request_parsing.model_names import Models

VERSION_HEADER: Final = "anthropic-version"


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a client's headers are those of Anthropic's API."""
    return VERSION_HEADER in Headers(scope=scope)


def card(models: Models, name: str) -> dict[str, object]:
    """The description of the model under one of its names. Raises ApiError."""
    served_name = models.check_name(name)
    created = datetime.fromtimestamp(models.created, UTC)
    return {
        "type": "model",
        "id": served_name,
        "display_name": served_name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": models.max_model_len,
        "max_tokens": models.max_model_len,
    }


def list_json(models: Models) -> dict[str, object]:
    """All cards, on one page."""
    return {
        "data": [card(models, name) for name in models.names],
        "first_id": models.names[0],
        "last_id": models.names[-1],
        "has_more": False,
    }
