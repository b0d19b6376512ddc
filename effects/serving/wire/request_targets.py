"""Checks of a request's first line and framing that uvicorn does not make.

An absolute target (`GET http://host/v1/models`), as clients of proxies send it, is
reduced to its path and host. Requests of other versions of HTTP than 1 are refused, and
those with two different marks of where their body ends (RFC 9112, 6.3): of two servers in
a row, one may take what follows for a part of the body. Their connections are closed.
"""

from collections.abc import Callable
from typing import Final
from urllib.parse import unquote_to_bytes

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.effects.serving.client_errors import ApiError

_SCHEMES: Final = (b"http://", b"https://")
_MAJOR_VERSION: Final = "1."  # of versions
_UNSUPPORTED_VERSION: Final = 505
_LENGTH, _CODING = b"content-length", b"transfer-encoding"
Refuse = Callable[[Exception, Scope], Response]


class NormalizeTarget:
    """Middleware: normalizes requests for the application."""

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        _normalize_target(scope)
        error = _framing_error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        response = self._refuse(error, scope)
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def _normalize_target(scope: Scope) -> None:
    """Make an absolute target a path, in place: outer middleware logs it, too."""
    target: bytes = scope.get("raw_path") or b""
    if not target.lower().startswith(_SCHEMES):
        return
    host, slash, path = target.partition(b"://")[2].partition(b"/")
    raw = slash + path or b"/"
    scope["raw_path"] = raw
    scope["path"] = unquote_to_bytes(raw).decode(errors="replace")
    other_headers = [header for header in scope["headers"] if header[0] != b"host"]
    scope["headers"] = [(b"host", host.rpartition(b"@")[2]), *other_headers]


def _framing_error(scope: Scope) -> ApiError | None:
    version = scope.get("http_version", "1.1")
    if not version.startswith(_MAJOR_VERSION):
        message = f"HTTP/{version} is not spoken here; use HTTP/1.1"
        return ApiError(message, status=_UNSUPPORTED_VERSION)
    names = {name for name, _ in scope["headers"]}
    if _LENGTH in names and _CODING in names:
        header_names = "Content-Length and Transfer-Encoding"
        return ApiError(f"{header_names} contradict each other; send one of them")
    return None
