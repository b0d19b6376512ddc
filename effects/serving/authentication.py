"""Who may ask: whoever sends the key, if there is one."""

import hmac
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.page.files import PATHS

# What needs no key: probes and scrapers have none, and browsers send none.
OPEN: Final = (
    "/health",
    "/healthz",
    "/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
    *PATHS,
)


class RequireKey:
    """Middleware: a request without the key gets what `refuse` makes of the error."""

    def __init__(
        self, app: ASGIApp, key: str, refuse: Callable[[Exception, Scope], ASGIApp]
    ) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode() if key else b""
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        allowed = self._allowed(scope)
        served = self._app if allowed else self._refuse(_wrong_key(), scope)
        await served(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["path"] in OPEN or not self._expected:
            return True
        headers = dict(scope["headers"])
        # As OpenAI's clients send a key, or as Anthropic's do.
        given = headers.get(b"authorization", b"")
        other = b"Bearer " + headers.get(b"x-api-key", b"")
        # In a time that does not tell how much of it is right.
        right = hmac.compare_digest(given, self._expected)
        return hmac.compare_digest(other, self._expected) or right


def _wrong_key() -> ApiError:
    why = "the API key is missing or wrong"
    return ApiError(why, None, "invalid_api_key", 401)
