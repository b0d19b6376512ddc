"""GET /v1/models in Anthropic's format, which its clients select by a header.

OpenAI's clients use the same address, without that header.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.serving.request_parsing.model_names import Models

VERSION_HEADER: Final = "anthropic-version"


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a client's headers are those of Anthropic's API."""
    return VERSION_HEADER in Headers(scope=scope)


def card(models: Models, name: str) -> dict[str, object]:
    """The description of the model under one of its names. Raises ApiError."""
    return _card(models, models.check_name(name), models.created)


def adapter_card(models: Models, entry: AdapterEntry) -> dict[str, object]:
    """The description of an adapter of the model."""
    return _card(models, entry.name, entry.created)


def _card(models: Models, name: str, created_at: int) -> dict[str, object]:
    created = datetime.fromtimestamp(created_at, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": models.max_model_len,
        "max_tokens": models.max_model_len,
    }


def list_json(models: Models, adapters: Sequence[AdapterEntry] = ()) -> dict[str, object]:
    """All cards, of the model and of these adapters, on one page."""
    cards = [card(models, name) for name in models.names]
    cards += [adapter_card(models, entry) for entry in adapters]
    return {
        "data": cards,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
        "has_more": False,
    }
