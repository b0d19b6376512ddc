"""The id of a request for its client: `x-request-id`, on every answer.

A client may choose it, with the header of the same name, and gets it back. Otherwise it
is the answer's own id, or a new one where nothing was generated. It identifies a request
for people; the engine's own ids are never taken from a client.
"""

import uuid
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID_HEADER: Final = b"x-request-id"
MAX_ID_CHARS: Final = 128  # of an id
# Of a scope: the id that the client chose, or nothing.
CHOSEN_ID_FIELD: Final = "minfer.request_id"
# The messages that begin an answer, whether it is of HTTP or of a WebSocket.
_FIRST_MESSAGES: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
_PRINTABLE: Final = range(0x20, 0x7F)  # of ASCII

HeaderPairs = Iterable[tuple[bytes, bytes]]


class RequestIds:
    """Middleware: the outermost, so that errors of everything inside have an id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and put its id on the head of the answer."""
        chosen = _chosen_id(scope.get("headers", ()))
        scope[CHOSEN_ID_FIELD] = chosen.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] in _FIRST_MESSAGES:
                headers = _with_id(message.get("headers", ()), chosen)
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _chosen_id(headers: HeaderPairs) -> bytes:
    """The id that a client chose; empty if it chose none, or an invalid one."""
    chosen = dict(headers).get(ID_HEADER, b"").strip()
    is_valid = len(chosen) <= MAX_ID_CHARS and all(byte in _PRINTABLE for byte in chosen)
    return chosen if is_valid else b""


def _with_id(headers: HeaderPairs, chosen: bytes) -> list[tuple[bytes, bytes]]:
    """Headers with an id: the client's, else the answer's own, else a new one."""
    headers_kept = list(headers)
    if chosen:
        headers_kept = [
            (name, value) for name, value in headers_kept if name.lower() != ID_HEADER
        ]
    elif any(name.lower() == ID_HEADER for name, _ in headers_kept):
        return headers_kept
    return [*headers_kept, (ID_HEADER, chosen or f"req-{uuid.uuid4().hex}".encode())]
