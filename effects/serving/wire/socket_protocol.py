"""uvicorn's side of a WebSocket, with bounds on a client's use of time and memory.

    bytes received ........ few are read and parsed in one turn of the event loop, so that
                            other tasks run between the parts of a flood
    messages .............. one is passed on in a turn; more bytes are read when all
                            messages were taken (uvicorn's)
    answers and pongs ..... while some are not sent, as the client does not read them,
                            the next message is not passed on, and at most one more part
                            is read; if none of them can be sent for `stall` seconds, the
                            connection is aborted
    a message in frames ... is stored as its bytes, however many frames it has; it must be
                            complete `stall` seconds after it began, or it is refused
                            (1008)

uvicorn has two error lines that any client could cause at each try: that of a handshake
that is refused with a status, which uvicorn takes for one without an answer, and that of
a text that is not UTF-8. They are not logged here.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

from minfer.effects.serving.wire.connections import STALL_SECONDS

READ_BYTES: Final = 2**10  # bytes read at once: of the smallest frames, at most 170
LARGE_READ_BYTES: Final = 2**14  # likewise, in a frame of which as many are there
_INVALID_TEXT: Final = 1007  # the close code of a text that is not UTF-8
_POLICY_VIOLATION: Final = 1008  # the close code of a message that takes too long


class SocketProtocol(WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """One WebSocket, from its handshake on."""

    stall = STALL_SECONDS

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._buffer = memoryview(b"")  # the bytes that are being read
        self._unsent = 0  # bytes, when the timer began
        self._stall_timer: asyncio.TimerHandle | None = None  # while bytes are not sent
        self._message_timer: asyncio.TimerHandle | None = (
            None  # while a message is incomplete
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Have uvicorn notified of bytes that cannot be sent at once."""
        super().connection_made(transport)
        # With a limit of 0, asyncio's TLS would pause writing when all bytes are sent.
        self.transport.set_write_buffer_limits(1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._stall_timer = _cancel(self._stall_timer)
        self._message_timer = _cancel(self._message_timer)
        self.read_paused = False  # else uvicorn resumes it, for messages in its queue
        super().connection_lost(exc)
        # An incomplete message is freed now: this object and its task refer to each
        # other, and collections of such cycles are rare.
        self._buffer = memoryview(b"")
        self.frames = []
        self.conn.reader.buffer.clear()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # asyncio's
        """The buffer for the next bytes: a view, as TLS is written to slices of it."""
        num_buffered = len(self.conn.reader.buffer)  # of an incomplete frame
        self._buffer = memoryview(
            bytearray(max(READ_BYTES, min(num_buffered, LARGE_READ_BYTES)))
        )
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the received bytes, unless the connection is closing: then asyncio's TLS
        may still receive some, and its transport fails after a second `close`.
        """
        if self.transport.is_closing():
            return
        self.data_received(bytes(self._buffer[:nbytes]))
        if self.transport.is_closing():
            return
        if not self.writable.is_set():
            self.transport.pause_reading()
        is_read = self.writable.is_set() and not self.read_paused
        if not is_read or not (self.frames or self.conn.reader.buffer):
            self._message_timer = _cancel(self._message_timer)
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self.stall, self._refuse_late)

    def pause_writing(self) -> None:
        """Begin to count the time in which the client does not read."""
        super().pause_writing()
        if self._stall_timer is None:
            self._await_reader()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """The next message, once the client has read the answers so far."""
        await self.writable.wait()
        await asyncio.sleep(0)  # let other tasks run
        return await super().receive()

    async def send(self, message: Any) -> None:
        """Send the application's message. Raises OSError if the client is gone."""
        while not self.writable.is_set():  # again, as another task may be first
            await self.writable.wait()
        is_gone = self.close_sent
        if is_gone:
            raise ClientDisconnected
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        """Append the bytes of a frame to its message."""
        if len(self.frames) == 1:
            # uvicorn joins them; only a bytearray is not copied with each frame
            self.frames.append(bytearray())  # type: ignore[arg-type]
        self.frames[1] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Pass on a complete message."""
        self._message_timer = _cancel(self._message_timer)
        if self.curr_msg_data_type == "text" and not _is_text(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(_INVALID_TEXT)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def _await_reader(self) -> None:
        if not self.transport.is_closing():
            self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall, self._look_for_reader)

    def _look_for_reader(self) -> None:
        """Abort the connection if nothing was sent since the timer began, or if it is
        closing.
        """
        closing = self.transport.is_closing()
        if not closing and self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader()
        else:
            self.transport.abort()

    def _refuse_late(self) -> None:
        self._message_timer = None
        if self.conn.state is State.OPEN:
            self.conn.fail(
                _POLICY_VIOLATION, f"a message took longer than {self.stall:g} s"
            )
            self.handle_parser_exception()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """None, after a timer was cancelled."""
    if timer is not None:
        timer.cancel()
    return None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
