"""The models of a router's backends. They decide which backends can serve a request, and
how large its body may be.

A backend names its models in its answer to GET /ready (minfer) or GET /v1/models, which
has their contexts, too. A backend that names none (it may require a key) may have any
model. So may one with adapters: it may load one on first use, and names those that are
loaded to the keys that may use them. A name that is none of its models' is an adapter's.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec
from attrs import define, field, frozen

from minfer.effects.proxy.bounded_read import read_at_most
from minfer.effects.serving.client_errors import ApiError

MODELS_PATH: Final = "/v1/models"
MAX_LIST_BYTES: Final = 2**22  # 4,096 adapters with long names take 3 MB
MAX_CONTEXT_TOKENS: Final = 2**23  # larger contexts of backends are taken for this
LIST_TIMEOUT_SECONDS: Final = 5.0  # for the list of a backend
# Headers of a client on which a list of models depends.
_FORWARDED_HEADERS: Final = (b"authorization", b"x-api-key", b"anthropic-version")
_MAX_NAME_CHARS: Final = 200  # of a model's name in an error
_NOT_FOUND: Final = 404
_OK: Final = 200


@frozen
class ModelList:
    """The models of a backend, as it reports them."""

    names: frozenset[str] = frozenset()
    context: int = 0  # tokens of the longest; 0: not known
    takes_adapters: bool = False  # other names than these may be adapters'
    own: frozenset[str] = frozenset()  # the names that are no adapters'


@define
class BackendModels:
    """The models of each backend."""

    _backends: Sequence[str]
    _lists: dict[str, ModelList] = field(factory=dict, init=False)

    def note(self, backend: str, models: ModelList) -> None:
        """Note the models that a backend names."""
        self._lists[backend] = models

    @property
    def longest_context(self) -> int:
        """The tokens of the longest context that a backend reports; 0: none does."""
        return max((models.context for models in self._lists.values()), default=0)

    @property
    def differ(self) -> bool:
        """Whether backends have different models."""
        lists = {models.names for models in self._lists.values() if models.names}
        return len(lists) > 1

    def backends_of(self, model: str) -> tuple[str, ...] | None:
        """The backends that may have a requested model; None: any. Raises ApiError if
        none has it.
        """
        if not model or not self.differ:
            return None
        names = {name: self._names(name) for name in self._backends}
        matching = [
            backend
            for backend, models in names.items()
            if not models or model in models or self._takes_adapters(backend)
        ]
        if not matching:
            names_text = ", ".join(sorted(frozenset[str]().union(*names.values())))
            unknown = repr(model[:_MAX_NAME_CHARS])
            message = f"there is no model {unknown} here; there is {names_text}"
            raise ApiError(message, "model", "model_not_found", _NOT_FOUND)
        return tuple(sorted(matching))

    def adapter(self, model: str) -> str:
        """The name of the adapter that is requested as a model; nothing, if that is a
        model, or no backend has adapters.
        """
        taking = [models for models in self._lists.values() if models.takes_adapters]
        is_own = any(model in models.own for models in taking)
        if not model or len(model) > _MAX_NAME_CHARS or not taking or is_own:
            return ""
        return model

    def _takes_adapters(self, backend: str) -> bool:
        return self._lists.get(backend, ModelList()).takes_adapters

    def _names(self, backend: str) -> frozenset[str]:
        return self._lists.get(backend, ModelList()).names


def read_models(answer: bytes) -> ModelList:
    """The models in an answer to GET /ready or GET /v1/models."""
    fields = _fields(answer)
    cards = _cards(fields)
    listed = fields.get("models")
    names = [*cards, *(listed if isinstance(listed, list) else ())]
    contexts = [card.get("max_model_len") for card in cards.values()]
    longest = max((tokens for tokens in contexts if isinstance(tokens, int)), default=0)
    return ModelList(
        names=frozenset(name for name in names if isinstance(name, str)),
        context=min(max(longest, 0), MAX_CONTEXT_TOKENS),
        takes_adapters=isinstance(fields.get("adapters"), dict),
    )


async def list_models(
    http: aiohttp.ClientSession,
    backends: Sequence[str],
    headers: Iterable[tuple[bytes, bytes]],
) -> dict[str, Any] | None:
    """The lists of these backends as one, as a client with these headers gets them; None
    if there is none. The first backend that names a model describes it.
    """
    passed_on = {
        name.decode(): value.decode()
        for name, value in headers
        if name in _FORWARDED_HEADERS
    }
    answers = await asyncio.gather(
        *(_list_of(http, backend, passed_on) for backend in backends)
    )
    listed = [answer for answer in answers if _cards(answer)]
    if not listed:
        return None
    cards: dict[str, Any] = {}
    for answer in listed:
        cards |= {
            name: card for name, card in _cards(answer).items() if name not in cards
        }
    merged = {**listed[0], "data": [*cards.values()]}
    if "first_id" in merged:  # Anthropic's form
        merged |= {"first_id": next(iter(cards)), "last_id": next(reversed(cards))}
    return merged


async def _list_of(
    http: aiohttp.ClientSession, backend: str, headers: Mapping[str, str]
) -> dict[str, Any]:
    request = http.get(
        backend + MODELS_PATH,
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=LIST_TIMEOUT_SECONDS),
        allow_redirects=False,
    )
    try:
        async with request as response:
            body = await read_at_most(response.content, MAX_LIST_BYTES)
    except (aiohttp.ClientError, OSError):
        return {}
    return _fields(body or b"") if response.status == _OK else {}


def _fields(answer: bytes) -> dict[str, Any]:
    """The fields of an answer; empty, if it is no JSON object."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _cards(answer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The descriptions of models in a list, by their names."""
    data = answer.get("data")
    if not isinstance(data, list):
        return {}
    cards = [card for card in data if isinstance(card, dict)]
    return {card["id"]: card for card in cards if isinstance(card.get("id"), str)}
