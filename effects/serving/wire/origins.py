"""Whether a request comes from a web page of another origin.

A browser lets any page open a WebSocket to any address, or send a POST without a body,
and reports that page's origin. So requests that need no preflight are checked here: a
page must not use a server of the machine on which it is viewed.

Pages of the origins that the operator allows may use the server as its own page does;
browsers are informed by CORS headers, which never allow cookies and the like.
"""

import json
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.values.checks import ConfigError

ORIGINS_FIELD: Final = "minfer.origins"  # of a scope: other allowed origins
ANY_ORIGIN: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null", re.IGNORECASE)
_PREFLIGHT_SECONDS: Final = 600  # for which a browser may cache a preflight


def read_origins(words: Sequence[str]) -> list[str]:
    """Returns the origins of an option's words, of which some may be lists in JSON, as
    vLLM has them. Raises ConfigError.
    """
    origins: list[str] = []
    for word in words:
        origins += _read_list(word) if word.startswith("[") else [word]
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins: {origin!r:.200} is no origin; write a scheme and a "
                f"host, such as https://example.com, or {ANY_ORIGIN} for all"
            )
    return origins


def _read_list(word: str) -> list[str]:
    try:
        items = json.loads(word)
    except ValueError as error:
        raise ConfigError(f"--allowed-origins: {word!r:.200}: {error}") from None
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"--allowed-origins: {word!r:.200} is not a list of texts")
    return list(items)


def is_cross_origin(scope: Scope) -> bool:
    """Whether the request comes from a page of another address than this server's."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc == headers.get("host"):
        return False
    allowed: Sequence[str] = scope.get(ORIGINS_FIELD, ())
    return ANY_ORIGIN not in allowed and origin not in allowed


class AllowOrigins:
    """Middleware that lets pages of these origins in, or of all, if one is `*`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._origins = tuple(origins)
        self._app = CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
            allow_credentials=False,
            max_age=_PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with the headers of the origins that may read the answer."""
        scope[ORIGINS_FIELD] = self._origins
        await self._app(scope, receive, send)
