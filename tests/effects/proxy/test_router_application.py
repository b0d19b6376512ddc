"""Requests through a router: what reaches which backend, and what comes back."""

import asyncio
import json
from typing import Any

import pytest

from tests.effects.proxy.fakes import (
    ReceivedRequest,
    begin_events,
    chunk,
    close_at_once,
    routing,
    run,
)
from tests.effects.waiting import soon

LONG = "A question about blocks of a key-value cache, and how they are shared. " * 20


def test_a_conversation_stays_where_its_prefix_is() -> None:
    @run
    async def _() -> None:
        async with routing(3) as harness:
            homes = []
            for start in ("one ", "two ", "three "):
                texts, names = [start + LONG], set[str]()
                for turn in range(4):
                    names.add(await harness.answered_by(*texts))
                    texts += [f"answer {turn}", f"{turn} {LONG}"]
                homes.append(names)
            assert [len(home) for home in homes] == [1, 1, 1], "each stays"
            counts = harness.router.dispatcher.counts
            assert counts.hit_blocks > counts.blocks // 2


def test_the_same_text_in_other_clients_json_is_the_same_prefix() -> None:
    @run
    async def _() -> None:
        async with routing(2, policy="prefix") as harness:
            await harness.answered_by(LONG)
            plain = {"messages": [{"content": LONG, "role": "user"}], "model": "m"}
            mark = {"type": "ephemeral"}
            marked = [{"role": "user", "content": LONG, "cache_control": mark}]
            counts = harness.router.dispatcher.counts
            for body in (
                json.dumps(plain, indent=2),
                json.dumps({"messages": marked, "model": "m"}),
            ):
                await harness.http.post("/v1/chat/completions", content=body)
            assert counts.hit_blocks == counts.blocks * 2 // 3


def test_requests_pass_as_they_came_but_for_headers_of_a_connection() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            body = b'{"model": "m",   "prompt": "caf\xc3\xa9"}'
            headers = {
                "authorization": "Bearer k",
                "x-own": "1",
                "connection": "x-private",
                "x-private": "1",
                "te": "trailers",
                "x-forwarded-for": "10.1.1.1",
                "x-forwarded-host": "forged.example",
                "proxy-authorization": "secret",
                "host": "localhost:1",
            }
            answer = await harness.http.post(
                "/v1/completions?a=%2F&b", content=body, headers=headers
            )
            (request,) = harness.backends[0].seen
            assert answer.json()["by"] == "a"
            assert (request.method, request.target) == ("POST", "/v1/completions?a=%2F&b")
            assert request.body == body
            sent = request.headers
            assert (sent["authorization"], sent["x-own"]) == ("bearer k", "1")
            assert not {"x-private", "te", "proxy-authorization"} & sent.keys()
            assert sent["host"] == harness.backends[0].url.removeprefix("http://")
            assert sent["x-forwarded-for"] == "10.1.1.1, 127.0.0.1"
            assert sent["x-forwarded-host"] == "localhost:1"
            assert sent["x-forwarded-proto"] == "http"


def test_an_event_arrives_before_the_backend_sends_the_next() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            was_received = asyncio.Event()

            async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
                begin_events(writer, b"data: 1\n\n")
                await was_received.wait()
                writer.write(chunk(b"data: 2\n\n") + chunk(b""))

            harness.backends[0].answer = answer
            url, body = "/v1/chat/completions", {"messages": [], "stream": True}
            async with harness.http.stream("POST", url, json=body) as response:
                assert response.headers["content-type"] == "text/event-stream"
                chunks = response.aiter_raw()
                assert await anext(chunks) == b"data: 1\n\n"
                (replica,) = harness.router.dispatcher.available()
                assert (replica.requests, replica.waiting_tokens) == (1, 0), (
                    "it has started"
                )
                was_received.set()
                assert await anext(chunks) == b"data: 2\n\n"
            await soon(lambda: not harness.router.dispatcher.state.requests)


def test_a_client_that_leaves_ends_its_request_at_the_backend() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            (backend,) = harness.backends

            async def endless(
                request: ReceivedRequest, writer: asyncio.StreamWriter
            ) -> None:
                if b"stream" in request.body:
                    begin_events(writer, b"data: 1\n\n")
                await asyncio.sleep(60)

            backend.answer = endless
            url = "/v1/chat/completions"
            async with harness.http.stream(
                "POST", url, json={"stream": True}
            ) as response:
                await anext(response.aiter_raw())
            await soon(lambda: backend.left == 1)
            waiting = asyncio.ensure_future(harness.chat("a"))  # of which nothing came
            await soon(lambda: len(backend.seen) == 2)
            waiting.cancel()
            await soon(lambda: backend.left == 2)
            await soon(lambda: not harness.router.live)
            assert not harness.router.dispatcher.state.requests


def test_responses_are_asked_for_where_they_were_made() -> None:
    @run
    async def _() -> None:
        async with routing(3, policy="round_robin") as harness:
            homes = {}
            for _ in range(3):
                made_here = (await harness.http.post("/v1/responses", json={})).json()
                homes[made_here["id"]] = made_here["by"]
            assert len({*homes.values()}) == 3
            for key, name in homes.items():
                answers = [
                    await harness.http.get(f"/v1/responses/{key}"),
                    await harness.http.post(f"/v1/responses/{key}/cancel"),
                    await harness.http.delete(f"/v1/requests/{key}"),
                    await harness.http.post(
                        "/v1/responses", json={"previous_response_id": key}
                    ),
                ]
                assert [answer.json()["by"] for answer in answers] == [name] * 4
            assert (await harness.http.get("/v1/responses/x")).status_code == 404
            key, name = next(iter(homes.items()))
            home = next(backend for backend in harness.backends if backend.name == name)
            follow = {"previous_response_id": key}
            home.answer = close_at_once
            answer = await harness.http.post("/v1/responses", json=follow)
            assert answer.status_code == 502, "no other one can serve it"
            home.health = 500
            await harness.health(home.url)
            answer = await harness.http.post("/v1/responses", json=follow)
            assert answer.status_code == 503
            assert answer.json()["error"]["param"] == "previous_response_id"


def test_other_addresses_go_to_any_backend_or_nowhere() -> None:
    @run
    async def _() -> None:
        async with routing(2, down=1) as harness:
            for path in ("/v1/models", "/v1/models/a%2Fb", "/version"):
                assert (await harness.http.get(path)).json()["by"] == "a"
                assert harness.backends[0].seen[-1].target == path
            answer = await harness.http.post("/tokenize", json={"prompt": "a"})
            assert answer.json()["by"] == "a"
            count = len(harness.backends[0].seen)
            for path in ("/", "/reset_prefix_cache", "/v1/files", "/v1/stream", "/sleep"):
                answer = await harness.http.post(path)
                assert answer.status_code == 404
                assert answer.json()["error"]["code"] == "not_routed"
            assert len(harness.backends[0].seen) == count


@pytest.mark.parametrize(
    "target",
    [
        "/v1/files/x",
        "/v1//stream",
        "/v1/./files",
        "/v1/%2Ffiles",
        "/v1/%2e/files",
        "/v1/files//",
        "//v1/files",
        "/v1//chat/completions",
        "/v1/models//x",
        "/./version",
    ],
)
def test_no_other_spelling_leads_around_the_list_of_paths(target: str) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"404"
            assert b"not_routed" in await reader.read(1000)
            writer.close()
            assert harness.backends[0].seen == []


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PURGE"])
@pytest.mark.parametrize("target", ["/v1/models", "/health", "evil.example:80"])
def test_a_method_that_servers_need_not_know_is_not_passed_on(
    method: str, target: str
) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            writer.write(f"{method} {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"405"
            assert b"\nallow: DELETE, GET, HEAD, " in head
            writer.close()
            assert harness.backends[0].seen == []


@pytest.mark.parametrize(
    "target",
    [
        "@evil.example/v1/models",
        ":1@evil.example/v1/models",
        "evil.example:80",
        "/v1/%2e%2e/reset_prefix_cache",
        "/v1/../sleep",
        "/v1/files#",
        "/v1/chat/completions#x",
        "/v1/models%23#x",
        "http://evil.example",
    ],
)
def test_no_target_leads_to_another_host_or_out_of_the_api(target: str) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: evil.example\r\n\r\n".encode())
            status = (await reader.readline()).split()[1]
            assert status in (b"400", b"404")
            writer.close()
            assert harness.backends[0].seen == []


def test_an_absolute_target_goes_to_a_backend_whatever_host_it_names() -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            writer.write(b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
            (request,) = harness.backends[0].seen
            assert request.target == "/v1/models"
            assert "evil" not in request.headers["host"]


def test_bodies_are_bounded() -> None:
    @run
    async def _() -> None:
        async with routing(1, max_body=1000) as harness:
            answer = await harness.chat("a" * 1000)
            assert answer.status_code == 413
            answer = await harness.http.post("/v1/messages", content=b"a" * 1001)
            assert answer.json()["error"]["type"] == "request_too_large"

            async def parts() -> Any:
                for _ in range(20):
                    yield b"a" * 100

            answer = await harness.http.post("/v1/completions", content=parts())
            assert answer.status_code == 413
            assert harness.backends[0].seen == []
            await soon(lambda: not harness.router.live)
            assert harness.router._bodies.held_bytes == 0


def test_keys_are_checked_and_passed_on() -> None:
    from minfer.effects.serving.access.api_keys import read_keys

    @run
    async def _() -> None:
        async with routing(1, keys=read_keys(["k"], None)) as harness:
            assert (await harness.chat("a")).status_code == 401
            assert (await harness.http.get("/router")).status_code == 401
            key = {"authorization": "Bearer k"}
            assert (await harness.chat("a", headers=key)).status_code == 200
            (request,) = harness.backends[0].seen
            assert request.headers["authorization"] == "bearer k"


def test_the_router_says_how_it_is() -> None:
    @run
    async def _() -> None:
        async with routing(2, down=1) as harness:
            await harness.chat(LONG)
            status = (await harness.http.get("/router")).json()
            assert [backend["health"] for backend in status["backends"]] == [
                "ready",
                "gone",
            ]
            assert status["placed"] == 1
            assert status["backends"][0]["assumed_blocks"] == status["prompt_blocks"] > 4
            text = (await harness.http.get("/metrics")).text
            up = f'minfer_router_backend_ready{{backend="{harness.backends[0].url}"}} 1.0'
            assert up in text
            assert "minfer_router_placements_total 1.0" in text
            assert (await harness.http.get("/health")).status_code == 200
            assert (await harness.http.get("/ready")).status_code == 200
            harness.backends[0].health = 503
            await harness.health(harness.backends[0].url)
            assert (await harness.http.get("/ready")).status_code == 503
