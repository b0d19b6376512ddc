"""Large and compressed bodies: who reads them, and how large they may be."""

import asyncio
import gzip
import json
import os
import signal
import time
from typing import Any

import httpx
import msgspec
import pytest

from minfer.effects.proxy import prompt_reader
from minfer.effects.proxy.prompt_bodies import (
    KeyFacts,
    PromptBody,
    ReadPrompt,
    read_prompt,
)
from minfer.effects.proxy.prompt_reader import MAX_LOOP_TEXT_BYTES
from minfer.effects.proxy.prompt_worker import PromptWorker
from minfer.effects.proxy.token_keys import TokenKeys
from minfer.effects.serving.input_workers.worker_messages import WorkerRequest
from minfer.effects.serving.request_parsing.limits import MIN_BODY_LIMIT_BYTES
from minfer.effects.setup.folders import bundled_folder
from tests.effects.proxy.fakes import Routing, routing, run
from tests.effects.waiting import soon

ATTACKERS = 8


def text_of(size: int) -> bytes:
    """A chat of `size` bytes."""
    start, end = b'{"messages":[{"role":"user","content":"', b'"}]}'
    words = b"word " * (size // 5)
    return start + words[: size - len(start) - len(end)] + end


async def post(harness: Routing, body: bytes, coding: str = "") -> httpx.Response:
    headers = {"content-encoding": coding} if coding else {}
    url = "/v1/chat/completions"
    return await harness.http.post(url, content=body, headers=headers)


def test_the_event_loop_neither_inflates_nor_parses_what_is_large() -> None:
    """The time of its own thread counts, so other load does not."""

    @run
    async def _() -> None:
        size = 2**25
        bomb = gzip.compress(text_of(size))
        assert len(bomb) < 2**17
        async with routing(1, max_body=size, workers=1) as harness:
            harness.http.timeout = httpx.Timeout(60)
            await post(
                harness, gzip.compress(text_of(2**20)), "gzip"
            )  # the worker is ready
            begin = time.thread_time()
            answers = await asyncio.gather(
                *(post(harness, bomb, "gzip") for _ in range(ATTACKERS))
            )
            spent = time.thread_time() - begin
            assert [answer.status_code for answer in answers] == [200] * ATTACKERS
            assert spent < ATTACKERS * 0.05, "read here, a body takes 0.25 s or more"
            assert [request.body for request in harness.backends[0].seen[1:]] == [
                bomb
            ] * ATTACKERS


def test_only_short_bodies_are_read_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes_read = list[int]()

    def noted(body: PromptBody, tokens: Any) -> Any:
        sizes_read.append(len(body.data))
        return read_prompt(body, tokens)

    monkeypatch.setattr(prompt_reader, "read_prompt", noted)

    @run
    async def _() -> None:
        async with routing(1, workers=1) as harness:
            assert len(harness.router._reader.prompts.pool.pids) == 1
            for size in (500, MAX_LOOP_TEXT_BYTES, MAX_LOOP_TEXT_BYTES + 1):
                assert (await post(harness, text_of(size))).status_code == 200
            assert (await post(harness, gzip.compress(b"{}"), "gzip")).status_code == 200
            assert sizes_read == [500, MAX_LOOP_TEXT_BYTES]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_large_prompt_has_keys_however_it_comes(workers: int) -> None:
    @run
    async def _() -> None:
        async with routing(1, workers=workers) as harness:
            counts, body = harness.router.dispatcher.counts, text_of(100_000)
            await post(harness, body)
            blocks = counts.blocks
            assert blocks > 300
            await post(harness, gzip.compress(body), "gzip")
            assert counts.hit_blocks == blocks
            session = {"prompt_cache_key": "s", "previous_response_id": "unknown"}
            answer = await harness.chat("a" * 100_000, **session, max_tokens=5)
            assert answer.status_code == 200


@pytest.mark.parametrize("workers", [0, 1])
def test_a_body_that_inflates_too_far_is_refused_by_name(workers: int) -> None:
    @run
    async def _() -> None:
        async with routing(1, max_body=10**5, workers=workers) as harness:
            answer = await post(harness, gzip.compress(text_of(10**5 + 1)), "gzip")
            assert answer.status_code == 413
            assert "more than 100000 bytes" in answer.json()["error"]["message"]
            assert harness.backends[0].seen == []
            answer = await post(harness, gzip.compress(text_of(10**5)), "gzip")
            assert answer.status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip"])
def test_a_coding_that_the_router_cannot_read_is_its_backends_to_judge(
    coding: str,
) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            assert (await post(harness, b"no such thing", coding)).status_code == 200
            (request,) = harness.backends[0].seen
            assert request.body == b"no such thing"


def test_a_worker_that_dies_is_replaced_and_neighbours_are_served() -> None:
    @run
    async def _() -> None:
        async with routing(1, workers=1) as harness:
            large = text_of(10**5)
            await post(harness, large)
            (pid,) = harness.router._reader.prompts.pool.pids
            os.kill(pid, signal.SIGSTOP)
            first = asyncio.ensure_future(post(harness, large))
            second = asyncio.ensure_future(post(harness, large))
            await soon(lambda: len(harness.router._reader.prompts.pool) == 1)
            assert (await post(harness, text_of(500))).status_code == 200
            os.kill(pid, signal.SIGKILL)
            assert sorted([(await first).status_code, (await second).status_code]) == [
                200,
                413,
            ]


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_worker_reads_as_the_router_does(*, has_tokenizer: bool) -> None:
    folder = str(bundled_folder()) if has_tokenizer else None
    tokens = None if folder is None else TokenKeys(folder, 16)
    data = b'{"messages":[{"role":"user","content":"%s"}],"user":"u"}' % (b"a b " * 200)
    path = "/v1/chat/completions"
    body = PromptBody(path=path, coding="gzip", max_bytes=2**20, data=gzip.compress(data))
    worker = PromptWorker(KeyFacts(model=folder, block_size=16))
    reply = worker.reply(WorkerRequest(path=path, data=msgspec.msgpack.encode(body)))
    assert reply.record is not None
    read = msgspec.msgpack.decode(reply.record, type=ReadPrompt)
    assert read == read_prompt(body, tokens)
    assert len(read.keys) > 2
    assert read.user == "u"
    broken = worker.reply(WorkerRequest(path=path, data=b"no message"))
    assert broken.refusal is not None
    assert broken.refusal.status == 500


def cards(*contexts: int | None) -> dict[str, Any]:
    return {"data": [{"id": "m", "max_model_len": context} for context in contexts]}


@pytest.mark.parametrize(
    ("models", "max_bytes"),
    [
        (cards(2048), MIN_BODY_LIMIT_BYTES),
        (cards(None, 2**20), 8 * 2**20),
        (cards(2**62), 8 * 2**23),
        (cards(), MIN_BODY_LIMIT_BYTES),
        ({"data": "x"}, MIN_BODY_LIMIT_BYTES),
        ({"error": "no key"}, MIN_BODY_LIMIT_BYTES),
    ],
)
def test_bodies_are_as_large_as_the_longest_context_allows(
    models: Any, max_bytes: int
) -> None:
    @run
    async def _() -> None:
        async with routing(1, max_body=None, models=models) as harness:
            assert (
                harness.router._bodies.max_bytes
                == harness.router._reader.max_bytes
                == max_bytes
            )


def test_the_longest_context_of_all_backends_counts() -> None:
    @run
    async def _() -> None:
        async with routing(2, max_body=None, models=cards(2048)) as harness:
            _, second = harness.backends
            assert harness.router._bodies.max_bytes == MIN_BODY_LIMIT_BYTES
            for context, max_bytes in (
                (2**20, 2**23),
                (2**21, 2**24),
                (2048, MIN_BODY_LIMIT_BYTES),
            ):
                second.models, second.health = cards(context), 503
                await harness.health(second.url)
                second.health = 200
                await harness.health(second.url)  # as after a restart
                assert harness.router._bodies.max_bytes == max_bytes
            body = b" " * (MIN_BODY_LIMIT_BYTES + 1)
            answer = await post(harness, body)
            assert answer.status_code == 413
            assert json.loads(answer.content)["error"]["message"] == (
                f"the body has more than {MIN_BODY_LIMIT_BYTES} bytes"
            )


def test_a_given_size_stays() -> None:
    @run
    async def _() -> None:
        async with routing(1, max_body=1000, models=cards(2**20)) as harness:
            assert (
                harness.router._bodies.max_bytes
                == harness.router._reader.max_bytes
                == 1000
            )
