"""Clients that drip, that do not read, or that are too many, on real sockets."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.processes.server import listen_at
from minfer.effects.serving.wire.connections import (
    READ_BYTES,
    BoundedProtocol,
    ConnectionLimits,
    Connections,
    bounded,
)
from minfer.effects.serving.wire.shared_counts import SharedCount
from tests.effects.waiting import until

HEADER: Final = 0.3  # seconds
STALL: Final = 0.4  # seconds
LARGE: Final = b"x" * 50_000_000  # more than a socket takes unread
GET: Final = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
ended: list[str] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, without looking at a body but at /body; at /large, with a lot."""
    while scope["path"] == "/body" and (await receive()).get("more_body", False):
        pass
    body = LARGE if scope["path"] == "/large" else b"ok"
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for begin in range(0, len(body), 2**20):
        chunk = body[begin : begin + 2**20]
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    ended.append(scope["path"])


@contextlib.contextmanager
def server(count: SharedCount | None = None, **patience: Any) -> Iterator[int]:
    """Serves the application with little patience; yields the port."""
    patience = {"header": HEADER, "stall": STALL, **patience}
    config = uvicorn.Config(
        app,
        loop="asyncio",  # as the server's
        http=bounded(ConnectionLimits(**patience)),
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_keep_alive=1,
    )
    running = uvicorn.Server(config)
    if count is not None:
        running.server_state.connections = Connections(count)
    (listener,) = listen_at("127.0.0.1", 0)
    with listener:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not running.started:
                time.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as number:
        yield number


def link(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def drip(sock: socket.socket) -> None:
    """Send a byte now and then until the other side closes."""
    for _ in range(1000):
        try:
            sock.sendall(b"x")
        except ConnectionError:
            return
        time.sleep(HEADER / 10)
    raise AssertionError("1,000 bytes were waited for")


def answer(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            received += data
    return received


def receive_answer(sock: socket.socket) -> None:
    """Receive a small answer of the application, whole."""
    data = b""
    while not data.endswith(b"ok"):
        data += sock.recv(65536)
    assert data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("first", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-long: "])
def test_a_head_that_does_not_come_is_not_awaited(port: int, first: bytes) -> None:
    with link(port) as sock:
        begin = time.monotonic()
        sock.sendall(first)
        assert answer(sock).startswith(b"HTTP/1.1 408 Request Timeout")
        assert time.monotonic() - begin > HEADER / 2


@pytest.mark.long
def test_a_head_that_drips_is_not_awaited_either(port: int) -> None:
    with link(port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nx-long: ")
        drip(sock)


@pytest.mark.long
def test_the_second_head_of_a_connection_has_as_much_time(port: int) -> None:
    with link(port) as sock:
        for _ in range(2):
            sock.sendall(GET % b"")
            receive_answer(sock)
            time.sleep(1.5 * HEADER)  # an idle connection is not hurried
        sock.sendall(b"GET / HT")
        assert b"HTTP/1.1 408" in answer(sock)


@pytest.mark.long
def test_the_unread_rest_of_a_body_has_a_time_limit(port: int) -> None:
    with link(port) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        drip(sock)


def test_few_bytes_of_a_body_in_chunks_are_parsed_at_once(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    parse = BoundedProtocol.data_received

    def note_size(protocol: BoundedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", note_size)
    head = b"POST /body HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n"
    with link(port) as sock:
        chunks = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"
        sock.sendall(head % b"transfer-encoding: chunked" + chunks)
        receive_answer(sock)
        assert max(sizes) <= READ_BYTES
        sock.sendall(head % b"content-length: 1000000" + b"x" * 1_000_000)
        receive_answer(sock)
        assert max(sizes) > READ_BYTES, "others are read in large parts"


@pytest.mark.parametrize("answered", [False, True])
def test_a_body_that_is_no_http_is_no_error_in_the_log(
    port: int, caplog: pytest.LogCaptureFixture, *, answered: bool
) -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.ERROR, logger.name), link(port) as sock:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        garbage = b"zz\r\n"
        if answered:
            sock.sendall(head)
            receive_answer(sock)
            sock.sendall(garbage)
            answer(sock)
        else:
            sock.sendall(head + garbage)
            assert answer(sock).startswith(b"HTTP/1.1 400")
    logger.removeHandler(caplog.handler)
    assert caplog.messages == []


@pytest.mark.long
def test_a_client_that_does_not_read_is_disconnected(port: int) -> None:
    ended.clear()
    with link(port) as sock:
        begin = time.monotonic()
        sock.sendall(GET % b"large")
        while not ended:
            assert time.monotonic() - begin < 60
            time.sleep(0.01)
        assert time.monotonic() - begin > STALL / 2
        assert len(answer(sock)) < len(LARGE)


def test_a_slow_reader_gets_everything(port: int) -> None:
    with link(port) as sock:
        sock.sendall(GET % b"large")
        count = 0
        while count < len(LARGE):
            count += len(sock.recv(2**20))
            time.sleep(0.001)


@pytest.mark.long
def test_connections_beyond_the_limit_get_503() -> None:
    with server(connections=2, header=5.0) as port:
        with link(port) as first, link(port), link(port) as third:
            answers = answer(third)
            assert answers.startswith(b"HTTP/1.1 503 Service Unavailable")
            assert b"retry-after: 1" in answers
            first.sendall(GET % b"")
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
        for _ in range(100):  # those that left make room
            with link(port) as fourth:
                fourth.sendall(GET % b"")
                with contextlib.suppress(ConnectionError):
                    if fourth.recv(65536).startswith(b"HTTP/1.1 200"):
                        return
            time.sleep(0.02)
        raise AssertionError("no connection is accepted any more")


@pytest.mark.long
def test_health_is_answered_however_many_wait() -> None:
    upgrade = GET.replace(b"host", b"connection: upgrade\r\nupgrade: websocket\r\nhost")
    with server(connections=2, header=5.0) as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(link(port)) for _ in range(40)]
        for path in (b"health", b"healthz"):
            with link(port) as sock:
                sock.sendall(GET % path)
                answers = answer(sock)
                assert answers.startswith(b"HTTP/1.1 200")
                assert answers.endswith(b"ok")
                assert b"connection: close" in answers
        for head in (GET % b"", GET % b"health/x", upgrade % b"v1/stream"):
            with link(port) as sock:
                sock.sendall(head)
                assert answer(sock).startswith(b"HTTP/1.1 503")
        # Those that are too many have a moment, and gave way to others before it.
        assert all(answer(sock).startswith(b"HTTP/1.1 503") for sock in idle[2:])
        for sock in idle[:2]:
            sock.sendall(GET % b"")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.long
def test_connections_of_other_processes_count_too() -> None:
    counts = SharedCount.of(2)
    other_count = counts.at(1)
    other_count.set(2)
    with server(counts.at(0), connections=2, header=5.0) as port:
        with link(port) as first:
            assert answer(first).startswith(b"HTTP/1.1 503 Service Unavailable")
        other_count.set(1)
        with link(port) as second:
            second.sendall(GET % b"")
            assert second.recv(65536).startswith(b"HTTP/1.1 200")
            assert counts.total == 2
        until(lambda: counts.total == 1)
