"""Whether a web page of somebody else's asks.

A browser lets any page open a WebSocket to any address, or send a POST without a body,
and says which page it was. What does not go through a preflight therefore asks here, so
that a page cannot use a server of the machine on which it is looked at.

Pages of the origins that the server's owner allows may use it as its own page does: for
them browsers are told so (CORS), never with cookies and the like.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

ALLOWED: Final = "minfer.origins"  # of a scope: other origins whose pages may ask
ANY: Final = "*"
_REMEMBER: Final = 600  # seconds in which a browser need not ask again


def foreign(scope: Scope) -> bool:
    """Whether the request comes from a page of another address than this server's."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc == headers.get("host"):
        return False
    allowed: Sequence[str] = scope.get(ALLOWED, ())
    return ANY not in allowed and origin not in allowed


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
            max_age=_REMEMBER,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and say who may read the answer."""
        scope[ALLOWED] = self._origins
        await self._app(scope, receive, send)
