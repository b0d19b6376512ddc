"""A WebSocket on which many requests are answered at once, as JSON text messages.

    client    {"id": ..., "endpoint": "chat", "body": {...}}   as POST has it
              {"cancel": id}
    server    {"id": ..., "event": {...}}                      one for each event
              {"id": ..., "done": true}                        no more comes, or else
                                                               (+ "ignored": [names], of
                                                               fields without effect)
              {"id": ..., "status": 400, "error": {...}}       this is why
              {"id": null, "status": 400, "error": {...}}      of an invalid message

Ids are the client's, and may be used again after the end. A request that is cancelled
ends as `done`, with `"cancelled": true`. Each request costs its key as much as a POST,
and its body is read like that of one (`envelope`). The server closes a socket only for
messages far above the limit, for an incomplete message, and for a client that reads
nothing for a while (`socket_protocol`). A slow client delays its own requests only: no
output is lost, outputs that wait are joined, and the client's messages are read when it
has read the answers.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.client_errors import ApiError, to_api_error
from minfer.effects.serving.wire.envelope import (
    CancelMessage,
    OpenedMessage,
    RequestMessage,
    open_message,
)
from minfer.effects.serving.wire.error_form import failure
from minfer.effects.serving.wire.origins import is_cross_origin
from minfer.effects.serving.wire.request_ids import CHOSEN_ID_FIELD as CHOSEN_ID
from minfer.effects.serving.wire.socket_protocol import SocketProtocol
from minfer.effects.serving.wire.transport import (
    Failure,
    Handler,
    StreamEvent,
    Watcher,
)

MAX_OPEN_REQUESTS: Final = 128  # requests on one socket
ENVELOPE_BYTES: Final = 2**16  # of a message beyond its body, before it is refused
# uvicorn's settings. Messages are not compressed: they are small, and a small compressed
# message may be large here.
SOCKETS: Final[Mapping[str, Any]] = {
    "ws": SocketProtocol,
    "ws_per_message_deflate": False,
}
COUNTED_BYTES: Final = 2**17  # of a body, counted at once
_POLICY_VIOLATION: Final = 1008  # the close code for a client without access


class Channel:
    """One request on a socket, and its way back: a `Connection` and a `Transport`."""

    def __init__(self, scope: Scope, send: Send, message: RequestMessage) -> None:
        self.scope = scope
        self.chosen_id = str(scope.get(CHOSEN_ID, ""))
        self.gone = asyncio.Event()  # the client left, or cancelled it
        self.ended = False  # the end was sent
        self._send = send
        self._body = message.body
        self._id = json.dumps(message.id)
        self._ignored: Sequence[str] = ()  # fields of the body without effect

    def announced_size(self, max_bytes: int) -> int:  # noqa: ARG002  # the message is here
        """Bytes of the body."""
        return len(self._body)

    async def read(self, max_bytes: int, watch: Watcher) -> bytes:
        """The body, which is not kept. Raises ApiError if it has more than `max_bytes`
        bytes, and the errors of `watch`.
        """
        body, self._body = self._body, b""
        if len(body) > max_bytes:
            raise ApiError(f"the body has more than {max_bytes} bytes", status=413)
        for begin in range(0, len(body), COUNTED_BYTES):
            watch(body[begin : begin + COUNTED_BYTES])
            if len(body) > COUNTED_BYTES:
                await asyncio.sleep(0)  # let other tasks run
        return body

    async def wait_for_disconnect(self) -> NoReturn:
        """Wait until the client no longer wants the answer; raises ClientDisconnect."""
        await self.gone.wait()
        raise ClientDisconnect

    async def refuse(self, failure: Failure) -> None:
        """Answer with a failure and its status."""
        await self.fail(failure)

    def transport(
        self,
        *,
        stream: bool,  # noqa: ARG002  # the events show it
        name: str,  # noqa: ARG002  # the events have it
        ignored: Sequence[str] = (),
    ) -> "Channel":
        """The transport: the channel itself."""
        self._ignored = ignored
        return self

    async def write(self, events: Iterable[StreamEvent], *, last: bool) -> None:
        """Send each event as a message; `done` replaces a mark of the end."""
        for event in events:
            if not event.mark:
                await self._send_text(f'{{"id": {self._id}, "event": {event.data}}}')
        if last:
            names = json.dumps(self._ignored)
            ignored = f', "ignored": {names}' if self._ignored else ""
            await self._end(f'{{"id": {self._id}, "done": true{ignored}}}')

    async def fail(self, failure: Failure) -> None:
        """Send a failure, which ends the answer."""
        await self._end(_failure_text(self._id, failure))

    async def cancelled(self) -> None:
        """Send the end of a request that the client has cancelled."""
        await self._end(f'{{"id": {self._id}, "done": true, "cancelled": true}}')

    async def _end(self, text: str) -> None:
        self.ended = True
        await self._send_text(text)

    async def _send_text(self, text: str) -> None:
        """Send a message. Raises ClientDisconnect."""
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError:
            raise ClientDisconnect from None


class SocketSession:
    """One client's connection, and the requests that are open on it."""

    def __init__(
        self, handlers: Mapping[str, Handler], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._handlers = handlers
        self._scope = scope
        self._receive = receive
        self._send = send
        self._open: dict[str, Channel] = {}  # by the client's ids

    async def serve(self) -> None:
        """Handle messages until the client disconnects."""
        await self._receive()  # the client's request to connect
        await self._send({"type": "websocket.accept"})
        async with asyncio.TaskGroup() as group:
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._handle(message.pop("text", None), group)
            for channel in self._open.values():
                channel.gone.set()

    async def _handle(self, text: str | None, group: asyncio.TaskGroup) -> None:
        """Handle a message, or send its error."""
        name: str | None = None
        try:
            message = open_message(text)
            name = self._error_id(message.name)
            self._start_or_cancel(message, group)
        except ApiError as error:
            with contextlib.suppress(OSError):  # the client may be gone
                text = _failure_text(json.dumps(name), failure(error))
                await self._send({"type": "websocket.send", "text": text})

    def _error_id(self, name: str | None) -> str | None:
        """An id that an error may have: it must not seem to end an open request."""
        return None if not name or self._is_open(name) else name

    def _is_open(self, name: str) -> bool:
        """Whether a request is open: its id is free as soon as its end is sent."""
        return name in self._open and not self._open[name].ended

    def _start_or_cancel(self, opened: OpenedMessage, group: asyncio.TaskGroup) -> None:
        """Begin or cancel a request. Raises ApiError for an invalid message."""
        message = opened.parse()
        if isinstance(message, CancelMessage):
            if message.id in self._open:  # it may have ended in the meantime
                self._open[message.id].gone.set()
            return
        if self._is_open(message.id):
            raise ApiError(f"id: {message.id!r} is being answered; ids must differ", "id")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            reason = f"{MAX_OPEN_REQUESTS} requests are open on this socket"
            remedy = "wait for one to end"
            raise ApiError(f"{reason}; {remedy}", None, "too_many_requests", 429)
        if message.endpoint not in self._handlers:
            names = ", ".join(self._handlers)
            raise ApiError(
                f"endpoint: there is none of this name; there is {names}", "endpoint"
            )
        channel = Channel(self._scope, self._send, message)
        self._open[message.id] = channel
        group.create_task(self._serve_request(message.id, message.endpoint, channel))

    async def _serve_request(self, name: str, endpoint: str, channel: Channel) -> None:
        """Serve one request; an error does not affect the others."""
        try:
            await self._handlers[endpoint](channel)
            if not channel.ended:  # `gone` ended it
                await channel.cancelled()
        except ClientDisconnect:
            pass
        except Exception:
            logging.getLogger("uvicorn.error").exception("a request on a socket failed")
            if not channel.ended:
                with contextlib.suppress(ClientDisconnect):
                    await channel.fail(failure(to_api_error(RuntimeError())))
        finally:
            if self._open.get(name) is channel:
                del self._open[name]


def _failure_text(name: str, failure: Failure) -> str:
    """A failure as a message; protocols have a field `error` around it."""
    payload = json.loads(failure.event.data)
    error = json.dumps(payload.get("error", payload))
    return f'{{"id": {name}, "status": {failure.status}, "error": {error}}}'


class _SocketApp:
    """An ASGI application: Starlette calls functions with an object of its own."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_cross_origin(scope):
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await SocketSession(self._handlers, scope, receive, send).serve()


def socket_route(path: str, handlers: Mapping[str, Handler]) -> BaseRoute:
    """A socket at `path` for all `handlers`, by their names."""
    return WebSocketRoute(path, _SocketApp(handlers))
