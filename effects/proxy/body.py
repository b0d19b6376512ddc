"""Reads a request's body as it came, within bounds of size and time."""

import asyncio
from typing import Final

from attrs import define, field
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from minfer.effects.serving.client_errors import OVERLOADED, ApiError
from minfer.effects.serving.wire.post import MAX_LAG_SECONDS, MIN_BYTES_PER_SECOND

MAX_HELD_BYTES: Final = 2**30  # of all bodies whose requests wait or are answered
_TOO_LARGE: Final = 413
_TOO_SLOW: Final = 408
_UNAVAILABLE: Final = 503


@define(eq=False)
class Bodies:
    """The bodies that a router holds; each has at most `max_bytes`."""

    max_bytes: int
    held_bytes: int = field(default=0, init=False)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """A body, which counts as held until `release`. Raises ApiError and
        ClientDisconnect.
        """
        headers = dict(scope["headers"])
        if not headers.keys() & {b"content-length", b"transfer-encoding"}:
            return b""
        self._check(int(headers.get(b"content-length", b"0")))
        chunks, size = list[bytes](), 0
        deadline = asyncio.get_running_loop().time() + MAX_LAG_SECONDS
        try:
            more_body = True
            while more_body:
                message = await _next(receive, deadline + size / MIN_BYTES_PER_SECOND)
                chunk: bytes = message.get("body", b"")
                self._check(size + len(chunk), len(chunk))
                size += len(chunk)
                self.held_bytes += len(chunk)
                chunks.append(chunk)
                more_body = message.get("more_body", False)
        except BaseException:
            self.held_bytes -= size
            raise
        return b"".join(chunks)

    def release(self, body: bytes) -> None:
        """Note that a body is no longer needed."""
        self.held_bytes -= len(body)

    def _check(self, size: int, new_bytes: int = 0) -> None:
        if size > self.max_bytes:  # uvicorn drops the rest
            message = f"the body has more than {self.max_bytes} bytes"
            raise ApiError(message, status=_TOO_LARGE)
        if self.held_bytes + new_bytes > MAX_HELD_BYTES:
            message = "the router holds too many large requests"
            raise ApiError(message, None, OVERLOADED, _UNAVAILABLE)


async def _next(receive: Receive, deadline: float) -> Message:
    try:
        async with asyncio.timeout_at(deadline):
            message = await receive()
    except TimeoutError:
        reason = f"the body comes at less than {MIN_BYTES_PER_SECOND} bytes a second"
        raise ApiError(reason, status=_TOO_SLOW) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message
