"""Backends that hang: their requests move, and their refusals are not waited for."""

import asyncio
from unittest import mock

import pytest

from minfer.effects.proxy import forwarding, health
from tests.effects.proxy.fakes import (
    Backend,
    ReceivedRequest,
    Routing,
    begin_events,
    close_at_once,
    routing,
    run,
)
from tests.effects.waiting import soon


async def hang(_: ReceivedRequest, __: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def fall_silent(harness: Routing, backend: Backend) -> None:
    """Have a backend leave as many questions unanswered as make it silent."""
    backend.health = 0
    with mock.patch.object(health, "PROBE_TIMEOUT_SECONDS", 0.02):
        for _ in range(health.MAX_SILENT_PROBES):
            await harness.health(backend.url)


async def until_sent(harness: Routing, count: int) -> None:
    """Wait until backends have `count` requests."""
    await soon(lambda: sum(len(backend.seen) for backend in harness.backends) == count)


@pytest.fixture(autouse=True)
def no_other_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_INTERVAL_SECONDS", 60.0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_request_without_a_byte_moves_from_a_silent_backend(path: str) -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:
            for backend in harness.backends:
                backend.answer = hang
            asked = asyncio.ensure_future(harness.http.post(path, json={"prompt": "a"}))
            await soon(lambda: any(backend.seen for backend in harness.backends))
            silent, well = sorted(
                harness.backends, key=lambda backend: -len(backend.seen)
            )
            well.answer = Backend(well.name).answer
            await fall_silent(harness, silent)
            async with asyncio.timeout(5):
                answer = await asked
            assert answer.status_code == 200
            await soon(lambda: silent.left == 1)
            assert harness.router.metrics.retries == {"silent": 1}
            assert not harness.router.dispatcher.state.requests


def test_a_stream_that_has_begun_stays_on_a_silent_backend() -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:

            async def begin(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                begin_events(writer, b"data: 1\n\n")
                await asyncio.sleep(60)

            for backend in harness.backends:
                backend.answer = begin
            url, body = "/v1/chat/completions", {"messages": [], "stream": True}
            async with harness.http.stream("POST", url, json=body) as response:
                chunks = response.aiter_raw()
                await anext(chunks)
                (silent,) = [backend for backend in harness.backends if backend.seen]
                await fall_silent(harness, silent)
                await asyncio.sleep(0.05)
                assert silent.left == 0
                assert sum(len(backend.seen) for backend in harness.backends) == 1


def test_a_request_under_which_two_backends_fall_silent_goes_no_further() -> None:
    @run
    async def _() -> None:
        async with routing(4, policy="round_robin") as harness:
            for backend in harness.backends:
                backend.answer = hang
            asked = asyncio.ensure_future(harness.chat("a"))
            for count in (1, 2):
                await until_sent(harness, count)
                (holder,) = [
                    backend
                    for backend in harness.backends
                    if backend.seen and backend.health
                ]
                await fall_silent(harness, holder)
            await asyncio.sleep(0.05)
            assert sum(len(backend.seen) for backend in harness.backends) == 2
            assert not asked.done(), "it may still be answered where it is"
            asked.cancel()


def test_a_request_stays_while_no_other_backend_can_take_it() -> None:
    @run
    async def _() -> None:
        async with routing(2, down=1) as harness:
            silent, second = harness.backends
            silent.answer = hang
            asked = asyncio.ensure_future(harness.chat("a"))
            await soon(lambda: bool(silent.seen))
            await fall_silent(harness, silent)
            await asyncio.sleep(0.05)
            assert not asked.done()
            await second.start(int(second.url.rsplit(":", 1)[1]))
            await harness.health(second.url)
            await fall_silent(harness, silent)  # still
            async with asyncio.timeout(5):
                assert (await asked).json()["by"] == second.name


@pytest.mark.parametrize("endless", [False, True])
def test_a_refusal_is_not_waited_for(
    *, endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "REFUSAL_SECONDS", 0.1)
    monkeypatch.setattr(forwarding, "MAX_REFUSAL_BYTES", 2**12)

    async def refuse(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 503 Busy\r\ncontent-type: text/plain\r\nretry-after: 7\r\n"
            b"content-length: 1000000000\r\n\r\nbusy"
        )
        while endless:
            writer.write(b"busy" * 2**10)
            await writer.drain()
        await asyncio.sleep(60)

    @run
    async def _() -> None:
        async with routing(2, policy="round_robin") as harness:
            harness.backends[0].answer = refuse
            async with asyncio.timeout(5):
                assert {await harness.answered_by("a") for _ in range(4)} == {"b"}
            harness.backends[1].answer = refuse
            async with asyncio.timeout(5):
                answer = await harness.chat("a")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["code"] == "overloaded"
            if not endless:  # else its end is an error of the fake one
                await soon(lambda: sum(backend.left for backend in harness.backends) >= 2)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
@pytest.mark.parametrize("endless", [False, True])
def test_the_body_of_an_error_is_bounded(
    *, status: int, endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "ERROR_SECONDS", 1.0)
    monkeypatch.setattr(forwarding, "MAX_ERROR_BYTES", 2**16)

    async def drip(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {status} No\r\ncontent-length: 1000000000\r\n\r\n".encode()
        )
        while True:
            writer.write(b"x" * (2**10 if endless else 1))
            await writer.drain()
            await asyncio.sleep(0 if endless else 0.01)

    @run
    async def _() -> None:
        async with routing(1) as harness:
            harness.backends[0].answer = drip
            async with asyncio.timeout(5):
                with pytest.raises(Exception, match="without sending complete message"):
                    await harness.chat("a")
            if not endless:  # else its end is an error of the fake one
                await soon(lambda: harness.backends[0].left == 1)
            assert not harness.router.dispatcher.state.requests


def test_an_error_without_a_body_in_time_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "ERROR_SECONDS", 0.1)

    async def stall(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 9\r\n\r\n")
        await asyncio.sleep(60)

    @run
    async def _() -> None:
        async with routing(1) as harness:
            harness.backends[0].answer = stall
            async with asyncio.timeout(5):
                assert (await harness.chat("a")).status_code == 504


def test_another_backend_is_tried_once_for_a_question_that_ends_connections() -> None:
    @run
    async def _() -> None:
        async with routing(4) as harness:
            for backend in harness.backends:
                backend.answer = close_at_once
            answer = await harness.http.post("/tokenize", json={"prompt": "a"})
            assert answer.status_code == 502
            assert sum(len(backend.seen) for backend in harness.backends) == 2
