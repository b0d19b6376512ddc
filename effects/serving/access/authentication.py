"""API keys: if there are keys, a request must carry one of them.

The key's owner travels with the request, in its scope (`Caller`). A client that needs no
key is identified by its address, so that addresses share the server by turns.
"""

from collections.abc import Callable
from typing import Final

from attrs import frozen
from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.page import icon
from minfer.effects.serving.page.files import PAGE_PATHS

# Paths without a key: probes and scrapers have none, and browsers send none.
PATHS_WITHOUT_KEY: Final = (
    "/health",
    "/healthz",
    "/ready",
    "/metrics",
    "/openapi.json",
    icon.PATH,
    *PAGE_PATHS,
)
_SCOPE_FIELD: Final = "minfer.key"  # of a scope: the key that came with the request


@frozen
class Caller:
    """The client: its name for fair scheduling, and its key, if any."""

    name: str
    key: ApiKey | None = None


def caller_of(scope: Scope) -> Caller:
    """The client of a request."""
    key: ApiKey | None = scope.get(_SCOPE_FIELD)
    if key is not None:
        return Caller(key.name, key)
    address = scope.get("client")
    return Caller(address[0] if address else "")


def key_name(scope: Scope) -> str:
    """The name of the key of a request, or an empty string."""
    key: ApiKey | None = scope.get(_SCOPE_FIELD)
    return "" if key is None else key.name


class RequireKey:
    """Middleware: a request without a key is answered with what `refuse` returns."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, refuse: Callable[[Exception, Scope], ASGIApp]
    ) -> None:
        self._app = app
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["path"] in PATHS_WITHOUT_KEY or not self._keys.known:
            await self._app(scope, receive, send)
            return
        owner = self._owner(scope)
        if owner is None:
            await self._refuse(_wrong_key(), scope)(scope, receive, send)
            return
        scope[_SCOPE_FIELD] = owner
        await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> ApiKey | None:
        """The key of a request, in the form of OpenAI's clients or of Anthropic's."""
        headers = dict(scope["headers"])
        authorization: bytes = headers.get(b"authorization", b"")
        scheme, _, key = authorization.partition(b" ")  # of any case: RFC 9110, 11.1
        bearer = self._keys.owner(key.strip() if scheme.lower() == b"bearer" else b"")
        return bearer or self._keys.owner(headers.get(b"x-api-key", b""))


def _wrong_key() -> ApiError:
    message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
    return ApiError(message, None, "invalid_api_key", 401)
