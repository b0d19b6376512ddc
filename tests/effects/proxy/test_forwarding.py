"""Backends that fail before and after the first byte, refuse, or say nothing."""

import asyncio

import httpx
import pytest

from minfer.effects.serving.access.api_keys import read_keys
from tests.effects.proxy.fakes import (
    ReceivedRequest,
    begin_events,
    chunk,
    close_at_once,
    routing,
    run,
    write_json,
)


def test_another_backend_answers_for_one_that_is_gone_or_dies_first() -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:
            first, second = sorted(harness.backends, key=lambda backend: backend.url)
            first.answer = close_at_once
            assert await harness.answered_by("a") == second.name
            assert len(first.seen) == 1
            assert harness.router.metrics.retries == {"disconnect": 1}
        async with routing(2, policy="round_robin") as harness:
            for backend in harness.backends:
                await backend.stop()
            answer = await harness.chat("a")
            assert answer.status_code == 502
            assert harness.router.metrics.retries == {"connect": 1}
            assert harness.router.dispatcher.available() == [], "they have left at once"
            answer = await harness.chat("a")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "no_backend"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-a: a\x01b\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_an_answer_that_cannot_be_passed_on_is_a_failure(head: bytes) -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:
            first, second = sorted(harness.backends, key=lambda backend: backend.url)

            async def odd(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                writer.write(head)

            first.answer = odd
            assert await harness.answered_by("a") == second.name
            second.answer = odd
            assert (await harness.chat("a")).status_code == 502


def test_no_query_and_no_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def garbage(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                writer.write(b"my secret answer\r\n\r\n")

            harness.backends[0].answer = garbage
            answer = await harness.http.get("/v1/models?key=my-secret-key")
            assert answer.status_code == 502

    assert "Bad status line" in caplog.text
    assert "secret" not in caplog.text


def test_a_header_that_no_backend_takes_is_the_clients_fault() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            writer.write(
                b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: a\x01\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert not harness.backends[0].seen
            writer.close()


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_of_any_characters_passes_to_the_backend_unchanged(header: str) -> None:
    key = "schl\u00fcssel-\u65e5\u672c"
    value = (f"Bearer {key}" if header == "authorization" else key).encode()

    @run
    async def _() -> None:
        async with routing(1, keys=read_keys([key], None)) as harness:
            answer = await harness.http.post(
                "/v1/chat/completions", json={}, headers=[(header.encode(), value)]
            )
            assert answer.status_code == 200
            (request,) = harness.backends[0].seen
            assert request.headers[header] == value.decode("latin-1").lower()


def test_a_header_that_is_no_utf_8_is_refused_by_name() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            answer = await harness.http.post(
                "/v1/chat/completions", json={}, headers=[(b"x-own", b"caf\xe9")]
            )
            assert answer.status_code == 400
            assert "the header x-own" in answer.json()["error"]["message"]
            assert not harness.backends[0].seen


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nx-a: " + b"secret" * 20_000,
        b"HTTP/1.1 200 OK\r\nx-a: secret\r\n",
    ],
)
def test_no_head_is_logged(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def begin_a_head(
                _: ReceivedRequest, writer: asyncio.StreamWriter
            ) -> None:
                writer.write(answer)
                await writer.drain()
                writer.close()

            harness.backends[0].answer = begin_a_head
            assert (await harness.chat("a")).status_code == 502

    assert "failed: " in caplog.text
    assert "secret" not in caplog.text


def test_a_request_that_kills_servers_does_not_kill_them_all() -> None:
    @run
    async def _() -> None:
        async with routing(4) as harness:
            for backend in harness.backends:
                backend.answer = close_at_once
            assert (await harness.chat("a")).status_code == 502
            assert sum(len(backend.seen) for backend in harness.backends) == 2


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("/v1/chat/completions", b'data: {"error":{"message"'),
        ("/v1/responses", b'event: error\ndata: {"error":{"message"'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error(url: str, start: bytes) -> None:
    @run
    async def _() -> None:
        async with routing(2) as harness:

            async def die(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                begin_events(writer, b"data: 1\n\ndata: half of")
                await writer.drain()
                writer.close()

            for backend in harness.backends:
                backend.answer = die
            answer = await harness.http.post(url, json={"stream": True})
            assert answer.content.startswith(b"data: 1\n\ndata: half of\n\n" + start)
            assert answer.content.endswith(b"\n\n")
            assert harness.router.metrics.broken == 1
            assert harness.router.metrics.retries == {}


def test_a_backend_that_says_nothing_for_too_long_is_given_up() -> None:
    @run
    async def _() -> None:
        async with routing(2, backend_timeout=0.05) as harness:

            async def silent(
                request: ReceivedRequest, writer: asyncio.StreamWriter
            ) -> None:
                if b"stream" in request.body:
                    begin_events(writer, b"data: 1\n\n")
                await asyncio.sleep(60)

            for backend in harness.backends:
                backend.answer = silent
            answer = await harness.chat("a")
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "backend_timeout"
            assert harness.router.metrics.retries == {}, "another would take as long"
            answer = await harness.chat("a", stream=True)
            assert answer.content.startswith(b'data: 1\n\ndata: {"error"')
            assert not harness.router.dispatcher.state.requests


@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 200 OK\r\n"]
)
def test_a_head_has_to_be_whole_in_time(begin: bytes) -> None:
    @run
    async def _() -> None:
        async with routing(1, backend_timeout=0.3) as harness:

            async def drip(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                writer.write(begin)
                while True:
                    await asyncio.sleep(0.05)
                    if begin.endswith(b"OK\r\n"):
                        writer.write(b"x-a: b\r\n")

            harness.backends[0].answer = drip
            answer = await harness.chat("a")
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "backend_timeout"


def test_interim_responses_are_skipped_but_no_flood_of_them() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\n"

    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def some(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                writer.write(interim * 3)
                write_json(writer, {"by": "a"})

            async def flood(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                while True:
                    writer.write(interim * 200)
                    await writer.drain()
                    await asyncio.sleep(0.001)

            harness.backends[0].answer = some
            assert await harness.answered_by("a") == "a"
            harness.backends[0].answer = flood
            async with asyncio.timeout(5):
                assert (await harness.chat("a")).status_code == 502


def test_a_body_that_is_no_http_from_some_chunk_on_breaks_off() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def garble(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                begin_events(writer, b"data: 1\n\n")
                await writer.drain()
                await asyncio.sleep(0.1)
                writer.write(b"ZZZ\r\n")
                await asyncio.sleep(60)

            harness.backends[0].answer = garble
            async with asyncio.timeout(5):
                answer = await harness.chat("a", stream=True)
            assert answer.content.startswith(b'data: 1\n\ndata: {"error"')


@pytest.mark.parametrize("header", [b"content-length: 20", b"content-encoding: gzip"])
def test_no_event_follows_a_body_of_a_length_or_coding(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def break_off(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                framing = (
                    b"" if b"length" in header else b"transfer-encoding: chunked\r\n"
                )
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
                writer.write(framing + header + b"\r\n\r\n")
                writer.write(chunk(b"data: 1\n\n") if framing else b"data: 1\n\n")
                await writer.drain()
                await asyncio.sleep(0.1)
                writer.close()

            harness.backends[0].answer = break_off
            sent = harness.http.stream("POST", "/v1/chat/completions", json={})
            with pytest.raises(httpx.RemoteProtocolError):
                async with sent as answer:
                    _ = [chunk_data async for chunk_data in answer.aiter_raw()]

    assert "Exception in ASGI application" not in caplog.text


def test_a_body_that_breaks_off_is_cut_off() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def die(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
                await writer.drain()
                writer.close()

            harness.backends[0].answer = die
            with pytest.raises(Exception, match="without sending complete message"):
                await harness.chat("a")


def test_a_refusal_is_tried_elsewhere_once() -> None:
    @run
    async def _() -> None:
        async with routing(3, policy="round_robin") as harness:

            async def busy(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                write_json(writer, {"error": "busy"}, 429, b"retry-after: 7\r\n")

            first, second, third = sorted(
                harness.backends, key=lambda backend: backend.url
            )
            first.answer = busy
            assert await harness.answered_by("a") == second.name
            assert harness.router.metrics.retries == {"refused": 1}
            second.answer = third.answer = busy
            answer = await harness.chat("a")
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            assert answer.json() == {"error": "busy"}
            assert harness.router.metrics.retries == {"refused": 2}
        async with routing(1) as harness:
            harness.backends[0].answer = busy
            assert (await harness.chat("a")).status_code == 429
