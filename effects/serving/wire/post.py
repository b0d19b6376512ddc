"""A request over HTTP: a POST whose body is JSON, answered with a body or a stream."""

import asyncio
from collections.abc import Sequence
from typing import Final, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.coding import Decoder
from minfer.effects.serving.wire.http import HttpTransport, failure_response
from minfer.effects.serving.wire.plain_body import PlainBody
from minfer.effects.serving.wire.request_ids import CHOSEN_ID_FIELD as CHOSEN_ID
from minfer.effects.serving.wire.sse import EventStream
from minfer.effects.serving.wire.transport import Failure, Handler, Watcher

MEDIA_TYPE: Final = "application/json"
MAX_LAG_SECONDS: Final = 10.0  # that a body may lag behind its pace
MIN_BYTES_PER_SECOND: Final = 1024  # least bytes a second of a body


class Post:
    """One POST, and the answer to its client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send

    @property
    def chosen_id(self) -> str:
        """The x-request-id that the client chose, or an empty string."""
        return str(self.scope.get(CHOSEN_ID, ""))

    def announced_size(self, max_bytes: int) -> int:
        """Bytes of the body, by its head; `max_bytes` if it comes in chunks or is
        compressed.
        """
        headers = dict(self.scope["headers"])
        unknown = b"transfer-encoding" in headers or b"content-encoding" in headers
        return max_bytes if unknown else int(headers.get(b"content-length", b"0"))

    async def read(self, max_bytes: int, watch: Watcher) -> bytes:
        """The body, decoded. Raises ApiError if it is no JSON, has more than `max_bytes`
        bytes or comes too slowly, what `watch` raises, and ClientDisconnect.
        """
        request = Request(self.scope, self._receive)
        headers = request.headers
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != MEDIA_TYPE:
            message = f"send the body as Content-Type: {MEDIA_TYPE}"
            raise ApiError(message, status=415)
        decoder = Decoder(", ".join(headers.getlist("content-encoding")))
        data = bytearray()
        size = int(headers.get("content-length", "0"))  # as announced, or as received
        received = 0
        chunks = request.stream()
        deadline = asyncio.get_running_loop().time() + MAX_LAG_SECONDS
        while size <= max_bytes:
            try:
                async with asyncio.timeout_at(deadline + received / MIN_BYTES_PER_SECOND):
                    chunk = await anext(chunks, b"")
            except TimeoutError:
                message = (
                    f"the body comes at less than {MIN_BYTES_PER_SECOND} bytes a second"
                )
                raise ApiError(message, status=408) from None
            if not chunk:
                decoder.end()
                break
            received += len(chunk)
            for decoded in decoder.decode(chunk):
                watch(decoded)
                data += decoded
                size = max(size, len(data))
                if size > max_bytes:
                    break
                if not decoder.plain:
                    await asyncio.sleep(0)  # let other tasks run
        # uvicorn drops the rest, so that the client gets to read this.
        if size > max_bytes:
            raise ApiError(f"the body has more than {max_bytes} bytes", status=413)
        return bytes(data)

    async def wait_for_disconnect(self) -> NoReturn:
        """Wait until the client disconnects. Raises ClientDisconnect then."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    async def refuse(self, failure: Failure) -> None:
        """Answer with a failure and its status."""
        await failure_response(failure)(self.scope, self._receive, self._send)

    def transport(
        self, *, stream: bool, name: str, ignored: Sequence[str] = ()
    ) -> HttpTransport:
        """A body, or a stream of events."""
        kind = EventStream if stream else PlainBody
        return kind(self.scope, self._receive, self._send, name, ignored)


class _PostApp:
    """An ASGI application that hands each POST to what serves it.

    It is a class because Starlette calls functions with a Request, and no way to send.
    """

    def __init__(self, serve: Handler) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Post(scope, receive, send))


def post_route(path: str, serve: Handler) -> BaseRoute:
    """POST at `path`, and no other method."""
    return Route(path, _PostApp(serve), methods=["POST"])
