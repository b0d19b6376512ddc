"""Which models the backends of a router have, and so where a request may go.

A backend names its models in its answer to GET /ready (minfer) or GET /v1/models. As long
as it names none, as one that asks for a key, it may have any.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import aiohttp
from attrs import define, field

from minfer.effects.serving.client_errors import ApiError

MODELS_PATH: Final = "/v1/models"
# Headers of a client on which a list of models depends.
_PASSED_ON: Final = (b"authorization", b"x-api-key", b"anthropic-version")
_SHOWN: Final = 200  # characters of a model's name
_NOT_FOUND: Final = 404


@define
class BackendModels:
    """The names of each backend's models."""

    _names: dict[str, frozenset[str]] = field(factory=dict, init=False)

    def note(self, backend: str, models: Iterable[str]) -> None:
        """Note the models that a backend names."""
        self._names[backend] = frozenset(models)

    @property
    def differ(self) -> bool:
        """Whether backends have different models."""
        return len(set(filter(None, self._names.values()))) > 1

    def backends_of(self, model: object) -> tuple[str, ...] | None:
        """The backends that may have a requested model; None: any. Raises ApiError if
        none has it.
        """
        if not self.differ or not isinstance(model, str) or not model:
            return None
        found = [name for name, has in self._names.items() if not has or model in has]
        if not found:
            names = ", ".join(sorted(set[str]().union(*self._names.values())))
            why = f"there is no model {model[:_SHOWN]!r} here; there is {names}"
            raise ApiError(why, "model", "model_not_found", _NOT_FOUND)
        return tuple(sorted(found))


def model_names(answer: Any) -> list[str]:
    """The names in an answer to GET /ready or GET /v1/models; none, if it has none."""
    if not isinstance(answer, dict):
        return []
    given = answer.get("models") or answer.get("data")
    if not isinstance(given, list):
        return []
    names = [one.get("id") if isinstance(one, dict) else one for one in given]
    return [name for name in names if isinstance(name, str)]


async def list_models(
    http: aiohttp.ClientSession,
    backends: Sequence[str],
    headers: Iterable[tuple[bytes, bytes]],
) -> dict[str, Any] | None:
    """The lists of these backends as one, as a client with these headers gets them; None
    if there is none. The first backend that names a model describes it.
    """
    passed_on = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in _PASSED_ON
    }
    whole: dict[str, Any] | None = None
    cards: dict[str, Any] = {}
    for backend in backends:
        answer = await _list_of(http, backend, passed_on)
        if answer is None:
            continue
        whole = whole or answer
        for card in answer["data"]:
            cards.setdefault(card["id"], card)
    if whole is None:
        return None
    merged = {**whole, "data": [*cards.values()]}
    if "first_id" in whole:  # Anthropic's form
        merged |= {"first_id": next(iter(cards)), "last_id": next(reversed(cards))}
    return merged


async def _list_of(
    http: aiohttp.ClientSession, backend: str, headers: Mapping[str, str]
) -> dict[str, Any] | None:
    try:
        async with http.get(backend + MODELS_PATH, headers=headers) as response:
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return answer if model_names(answer) and "data" in answer else None
