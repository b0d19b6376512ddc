"""Connections: their number, and time limits for slow clients.

uvicorn waits forever for a head that comes byte by byte, and for a client that does not
read; both cost their client nothing, and the server a socket and buffers. Here a head has
a time limit, a client that reads nothing for a while is disconnected, and connections
beyond the limit, of all API servers together or of one's file descriptors, are refused. A
few of these stay open for a moment, as they may request /health: that is answered.
Anything else gets a 503, and so does the oldest of these when there are more than a few.

Few bytes are read in one turn of the event loop: a body in chunks of one byte takes so
long to parse that other connections would wait.

    made --> head ........ header_timeout, then 408 and closed
               |
             body ........ Post.read: body_timeout
               |
             answer ...... stall: seconds in which nothing could be written
               |
             idle ........ uvicorn's timeout_keep_alive, then a head again
"""

import asyncio
from typing import Any, ClassVar, Final

import h11
from attrs import frozen
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minfer.effects.serving.wire.descriptors import (
    MAX_SPARE_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    SPARE_DESCRIPTORS,
    UNAVAILABLE_RESPONSE,
    is_high,
    note_handshake_done,
)
from minfer.effects.serving.wire.shared_counts import SharedCount

HEADER_SECONDS: Final = 10.0
MAX_CONNECTIONS: Final = 1024
STALL_SECONDS: Final = 30.0
READ_BYTES: Final = 2**11  # bytes read at once: of the smallest chunks, at most 341
LARGE_READ_BYTES: Final = 2**16  # bytes read at once of a body with a Content-Length
LIVENESS_PATHS: Final = ("/health", "/healthz")  # paths that are answered in every state
EXTRA_HEAD_SECONDS: Final = 1.0  # for a head of a connection beyond the limit
_REQUEST_TIMEOUT: Final = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@frozen(kw_only=True)
class ConnectionLimits:
    """The limits of the number of connections, and of the time of each."""

    connections: int = MAX_CONNECTIONS
    header: float = HEADER_SECONDS  # seconds for a request's head
    stall: float = STALL_SECONDS  # seconds without anything being read by the client


class Connections(set[Any]):
    """uvicorn's set of a server's connections, of any protocol; its size is shared with
    the other processes of the server.
    """

    def __init__(self, count: SharedCount) -> None:
        super().__init__()
        self.count = count

    def add(self, element: Any) -> None:
        """One more."""
        super().add(element)
        self.count.set(len(self))

    def discard(self, element: Any) -> None:
        """One less."""
        super().discard(element)
        self.count.set(len(self))


def _total_connections(connections: set[Any]) -> int:
    """The number of connections of all processes, if it is shared."""
    if isinstance(connections, Connections):
        return connections.count.total
    return len(connections)


class _HealthOnly:
    """An application for a connection beyond the limit: it serves only /health."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, the last of its connection."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        if scope["path"] in LIVENESS_PATHS:
            await self._app(scope, receive, send_closing)
            return
        headers = [(b"retry-after", b"1"), (b"content-length", b"0")]
        await send_closing(
            {"type": "http.response.start", "status": 503, "headers": headers}
        )
        await send({"type": "http.response.body"})


class BoundedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection. `limits`, and `extra`, the connections beyond the limit whose
    heads are awaited, belong to the class: uvicorn makes the instances.
    """

    limits = ConnectionLimits()
    extra: ClassVar[list["BoundedProtocol"]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None  # of a body that is not used
        self._buffer = memoryview(b"")  # the bytes that are being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Count it, and wait for a head."""
        super().connection_made(transport)
        descriptor = _descriptor(transport)
        note_handshake_done(descriptor)
        high = is_high(descriptor, RESERVED_DESCRIPTORS + SPARE_DESCRIPTORS)
        if high or _total_connections(self.connections) > self.limits.connections:
            self._serve_as_extra()
        else:
            self._start_head_timer()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # asyncio's
        """The buffer for the next bytes: a view, as TLS is written to slices of it."""
        headers = self.headers if self.conn.their_state is h11.SEND_BODY else []
        is_sized = any(name == b"content-length" for name, _ in headers)
        self._buffer = memoryview(bytearray(LARGE_READ_BYTES if is_sized else READ_BYTES))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes that were read."""
        buffer, self._buffer = self._buffer, memoryview(b"")
        self.data_received(bytes(buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse data; a head's time runs from its first byte until it is complete."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
            self._leave_extra()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._stop_head_timer()
        self._leave_extra()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer of a client that reads too slowly."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self.limits.stall, self.transport.abort
            )

    def resume_writing(self) -> None:
        """Stop that timer: the client has read."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is no HTTP; close the connection if an answer has begun. The
        application's answer is dropped: h11 sends none after this.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Wait for the next request; not for long, if this one's body is still coming."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._rest_timer is None:
            self._rest_timer = self.loop.call_later(
                self.limits.header, self._close_late_rest
            )

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        if not self.transport.is_closing():
            super().timeout_keep_alive_handler()
            self._close()

    def _should_upgrade(self) -> bool:
        """Whether a request begins a WebSocket."""
        return not isinstance(self.app, _HealthOnly) and super()._should_upgrade()

    def _serve_as_extra(self) -> None:
        """Serve only /health, if its head comes soon; refuse the oldest of too many."""
        self.app = _HealthOnly(self.app)
        if len(self.extra) >= MAX_SPARE_CONNECTIONS:
            self.extra[0]._refuse()
        self.extra.append(self)
        moment = min(EXTRA_HEAD_SECONDS, self.limits.header)
        self._head_timer = self.loop.call_later(moment, self._refuse)

    def _leave_extra(self) -> None:
        if self in self.extra:
            self.extra.remove(self)

    def _refuse(self) -> None:
        self._stop_head_timer()
        self._leave_extra()
        if not self.transport.is_closing():
            self.transport.write(UNAVAILABLE_RESPONSE)
            self._close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(
            self.limits.header, self._refuse_late_head
        )

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(_REQUEST_TIMEOUT)
            self._close()

    def _close_late_rest(self) -> None:
        self._rest_timer = None
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._close()

    def _close(self) -> None:
        """Close; abort the connection if the client does not read the rest in time."""
        self.transport.close()
        self._stall_timer = self._stall_timer or self.loop.call_later(
            self.limits.stall, self.transport.abort
        )


def bounded(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """A class of connections with these limits."""
    return type("Bounded", (BoundedProtocol,), {"limits": limits, "extra": []})


def _descriptor(transport: asyncio.Transport) -> int:
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
