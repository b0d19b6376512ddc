"""Floods on a WebSocket, without a network: what the server reads, keeps and answers is
counted in bytes, messages and turns of the event loop. The clock is moved by hand.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from minfer.effects.serving.wire.socket_protocol import (
    LARGE_READ_BYTES,
    READ_BYTES,
    SocketProtocol,
)
from minfer.effects.serving.wire.transport import Connection, StreamEvent, ignore_part
from minfer.effects.serving.wire.websocket import socket_route

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Timer:
    def __init__(self, due_time: float, call: Callable[[], None]) -> None:
        self.due = due_time
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """An event loop's calls, of which those for later wait for `pass_`."""

    def __init__(self) -> None:
        self.create_task = asyncio.get_running_loop().create_task
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + delay, call))
        return self.timers[-1]

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        due_timers = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        for timer in due_timers:
            if not timer.cancelled:
                timer.call()


class Wire(asyncio.Transport):
    """A transport whose peer takes what it is sent, or nothing. Once it is closed it can
    do as little as asyncio's of TLS after a second `close`.
    """

    def __init__(self, protocol: SocketProtocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.takes = True
        self.high = 2**16
        self.unsent = bytearray()
        self.sent = bytearray()
        self.reading = True
        self.closing = self.aborted = False

    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None:
        assert low is None
        assert high != 0, "asyncio's TLS would pause writing when nothing is unsent"
        self.high = 2**16 if high is None else high

    def get_write_buffer_size(self) -> int:
        assert not self.closing
        return len(self.unsent)

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return self.reading and not self.closing

    def pause_reading(self) -> None:
        assert not self.closing
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reading = True

    def write(self, data: Any) -> None:
        size_before = len(self.unsent)
        (self.sent if self.takes else self.unsent).extend(data)
        if size_before <= self.high < len(self.unsent):
            self.protocol.pause_writing()

    def take(self, max_bytes: int | None = None) -> None:
        """The peer takes bytes that wait; all, and from now on: if no number is given."""
        self.takes = max_bytes is None
        self.sent += self.unsent[:max_bytes]
        del self.unsent[:max_bytes]
        if not self.unsent:
            self.protocol.resume_writing()

    def close(self) -> None:
        self.closing = True
        if not self.unsent:
            self._lose()

    def abort(self) -> None:
        self.closing = self.aborted = True
        self._lose()

    def _lose(self) -> None:
        if self.protocol in self.protocol.connections:
            self.protocol.connection_lost(None)


class Peer:
    """The client's side: what it floods, and what it hears."""

    def __init__(self, protocol: SocketProtocol, wire: Wire, clock: Clock) -> None:
        self.protocol = protocol
        self.wire = wire
        self.clock = clock
        self.fed = 0  # bytes that the server has read

    async def send(self, data: bytes) -> bytes:
        """Send as much as the server reads; returns the rest."""
        for _ in range(10_000):
            await asyncio.sleep(0)
            if self.wire.is_reading() and data:
                buffer = self.protocol.get_buffer(-1)
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                self.fed += count
                self.protocol.buffer_updated(count)
            elif not data or not self.wire.takes:
                break
        for _ in range(20):
            await asyncio.sleep(0)
        return data

    def receive(self) -> list[Frame]:
        """The frames that came behind the handshake."""
        _, _, data = bytes(self.wire.sent).partition(b"\r\n\r\n")
        reader = ServerProtocol()
        reader.state = State.OPEN
        unmasked = Frame.parse(reader.reader.read_exact, mask=False)
        frames = list[Frame]()
        reader.reader.feed_data(data)
        while reader.reader.buffer:
            try:
                next(unmasked)
            except StopIteration as end:
                frames.append(end.value)
                unmasked = Frame.parse(reader.reader.read_exact, mask=False)
        return frames


async def size(connection: Connection) -> None:
    """Answers with the size of the body."""
    data = await connection.read(2**22, ignore_part)
    transport = connection.transport(stream=True, name="x")
    await transport.write([StreamEvent(json.dumps({"size": len(data)}))], last=True)


@contextlib.asynccontextmanager
async def open_socket() -> AsyncIterator[Peer]:
    app = socket_route("/v1/stream", {"size": size})
    config = uvicorn.Config(app, log_level="critical", ws_max_size=2**22)
    config.load()
    clock = Clock()
    protocol = SocketProtocol(
        config, uvicorn.Server(config).server_state, {}, _loop=clock
    )
    wire = Wire(protocol)
    protocol.connection_made(wire)
    protocol.data_received(HANDSHAKE)
    peer = Peer(protocol, wire, clock)
    await peer.send(b"")
    assert b" 101 " in wire.sent
    yield peer
    wire.abort()
    await asyncio.gather(*protocol.tasks)


def frame(kind: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(kind, data, fin=fin).serialize(mask=True)


BODY = b'{"id": "a", "endpoint": "size", "body": {}}'
# What is sent again and again, and how many answers each has.
FLOODS: dict[str, tuple[bytes, int]] = {
    "no request": (frame(Opcode.TEXT, b"{}"), 1),
    "binary": (frame(Opcode.BINARY, b"{}"), 1),
    "requests under one id": (frame(Opcode.TEXT, BODY), 2),
    "messages in three frames": (
        frame(Opcode.TEXT, b"{", fin=False)
        + frame(Opcode.CONT, fin=False)
        + frame(Opcode.CONT, b"}"),
        1,
    ),
    "pings": (frame(Opcode.PING, b"x" * 125), 1),
    "empty pings": (frame(Opcode.PING), 1),
}


@pytest.mark.parametrize("name", FLOODS)
def test_nothing_more_is_read_while_answers_are_not(name: str) -> None:
    flood, answers = FLOODS[name]
    count = 3 * READ_BYTES // len(flood)

    async def conversation() -> None:
        async with open_socket() as peer:
            peer.wire.takes = False
            unread = await peer.send(flood * count)
            assert peer.fed <= 2 * READ_BYTES
            assert len(peer.wire.unsent) <= 2 * READ_BYTES
            assert len(peer.protocol.tasks) <= 2
            peer.wire.take()
            for _ in range(100):
                unread = await peer.send(unread)
            assert not unread
            while len(peer.receive()) < answers * count:
                await asyncio.sleep(0)
            assert len(peer.receive()) == answers * count

    asyncio.run(conversation())


def test_bytes_of_two_tls_records_are_read_at_once() -> None:
    """asyncio writes the second to a slice of the buffer."""
    data = frame(Opcode.TEXT, BODY)

    async def conversation() -> None:
        async with open_socket() as peer:
            buffer = peer.protocol.get_buffer(-1)
            buffer[:9] = data[:9]
            buffer[9:][: len(data) - 9] = data[9:]
            peer.protocol.buffer_updated(len(data))
            await peer.send(b"")
            assert json.loads(bytes(peer.receive()[0].data))["event"] == {"size": 2}

    asyncio.run(conversation())


@pytest.mark.parametrize("takes", [True, False])
def test_nothing_is_read_from_a_connection_that_is_closing(takes: bool) -> None:
    """TLS may still bring some bytes."""
    wrong = b"\x81\x02{}"  # not masked

    async def conversation() -> None:
        async with open_socket() as peer:
            peer.wire.takes = takes
            await peer.send(frame(Opcode.TEXT, BODY) + wrong)
            assert peer.wire.closing
            before = len(peer.wire.sent), len(peer.wire.unsent)
            buffer = peer.protocol.get_buffer(-1)
            buffer[: len(wrong)] = wrong
            peer.protocol.buffer_updated(len(wrong))
            assert before == (len(peer.wire.sent), len(peer.wire.unsent))
            peer.clock.pass_(peer.protocol.stall)
            assert peer.wire.aborted != takes

    asyncio.run(conversation())


def test_a_message_in_many_frames_is_kept_as_its_bytes() -> None:
    body = BODY.replace(b"{}", b'{"x": "' + b"y" * 2000 + b'"}')
    frames = [frame(Opcode.CONT, bytes([byte]), fin=False) for byte in body]
    data = b"".join([frame(Opcode.TEXT, fin=False), *frames])

    async def conversation() -> None:
        async with open_socket() as peer:
            await peer.send(data)
            assert not await peer.send(frame(Opcode.CONT, fin=False) * 3000)
            assert len(peer.protocol.frames) == 2
            assert sum(map(len, peer.protocol.frames)) == len(body)
            await peer.send(frame(Opcode.CONT))
            assert json.loads(bytes(peer.receive()[0].data))["event"] == {"size": 2009}

    asyncio.run(conversation())


def test_others_have_their_turn_between_two_messages() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def conversation() -> None:
        async with open_socket() as peer:
            ticking = asyncio.create_task(count())
            flood, _ = FLOODS["no request"]
            await peer.send(flood * 100)
            while len(peer.receive()) < 100:
                await asyncio.sleep(0)
            ticking.cancel()
            assert turns >= 100

    asyncio.run(conversation())


@pytest.mark.parametrize("progress", [0, 100])
def test_a_client_that_reads_nothing_is_disconnected(progress: int) -> None:
    async def conversation() -> None:
        async with open_socket() as peer:
            peer.protocol.stop_keepalive()
            peer.wire.takes = False
            await peer.send(FLOODS["pings"][0] * 100)
            for _ in range(3):
                assert not peer.wire.aborted
                peer.clock.pass_(0.9 * peer.protocol.stall)
                peer.wire.take(max_bytes=progress)
                peer.clock.pass_(0.2 * peer.protocol.stall)
                assert peer.wire.aborted == (progress == 0)
                if not progress:
                    break

    asyncio.run(conversation())


@pytest.mark.parametrize(
    ("begin", "progress", "end"),
    [
        (frame(Opcode.TEXT, b"{", fin=False), frame(Opcode.CONT, fin=False), b"}"),
        (b"\x81\xfe\x10\x00\0\0\0\0{", b" ", None),
    ],
    ids=["a message in frames", "a frame"],
)
def test_a_message_that_does_not_end_is_refused(
    begin: bytes, progress: bytes, end: bytes | None
) -> None:
    async def conversation() -> None:
        async with open_socket() as peer:
            peer.protocol.stop_keepalive()
            stall = peer.protocol.stall
            if end is not None:  # in time
                await peer.send(begin)
                peer.clock.pass_(0.9 * stall)
                await peer.send(frame(Opcode.CONT, end))
                peer.clock.pass_(0.9 * stall)
            await peer.send(begin)
            peer.clock.pass_(0.5 * stall)
            await peer.send(progress)
            assert not peer.wire.is_closing()
            peer.clock.pass_(0.6 * stall)
            assert peer.wire.is_closing()
            last = peer.receive()[-1]
            assert last.opcode is Opcode.CLOSE
            assert bytes(last.data).startswith((1008).to_bytes(2, "big"))

    asyncio.run(conversation())


def test_a_large_frame_is_read_in_large_parts_and_small_ones_are_not() -> None:
    body = BODY.replace(b"{}", b'{"x": "' + b"y" * 400_000 + b'"}')
    sizes = list[int]()

    async def conversation() -> None:
        async with open_socket() as peer:
            take = peer.protocol.buffer_updated

            def noted(count: int) -> None:
                sizes.append(count)
                take(count)

            peer.protocol.buffer_updated = noted  # type: ignore[assignment, method-assign]
            await peer.send(frame(Opcode.TEXT, body))
            assert LARGE_READ_BYTES * len(sizes) < 1.3 * len(body)
            sizes.clear()
            await peer.send(FLOODS["no request"][0] * 300)
            assert max(sizes) == READ_BYTES

    asyncio.run(conversation())


def test_an_incomplete_message_is_freed_as_its_connection_ends() -> None:
    data = frame(Opcode.TEXT, b"x" * 200_000)[:-1]

    async def conversation() -> None:
        async with open_socket() as peer:
            await peer.send(data)
            reader = peer.protocol.conn.reader
            assert len(reader.buffer) >= 199_000
            peer.protocol.connection_lost(None)
            assert not reader.buffer

    asyncio.run(conversation())
