"""Bodies are prepared in turn, in bounded time, and only while they are wanted."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import attrs
import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.errors import EngineDeadError, TooLongError
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.input_workers import process
from minfer.effects.serving.input_workers import worker_pool as module
from minfer.effects.serving.input_workers.task import ModelFacts, PreparedRequest
from minfer.effects.serving.input_workers.worker_messages import WorkerReply, decode_reply
from minfer.effects.serving.input_workers.worker_pool import SMALL_BODY_BYTES, WorkerPool
from minfer.effects.serving.openai.completions import ENDPOINT
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.serving.tokens.tokenize import QUERY_ENDPOINT as TOKENIZE


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 3, **fields}).encode()


def run(
    llm: AsyncLLM,
    use: Callable[[WorkerPool], Awaitable[None]],
    workers: int,
    **options: Any,
) -> None:
    """Do something with a pool."""

    async def whole(threads: ThreadPoolExecutor) -> None:
        facts = ModelFacts.of(llm, ("m",))
        models = Models(("m",), 0, 2048)
        pool = WorkerPool(facts, llm, models, threads, workers=workers, **options)
        try:
            await use(pool)
        finally:
            pool.close()
            pool.close()

    with ThreadPoolExecutor(2) as threads:
        asyncio.run(whole(threads))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_processes_and_threads_prepare_alike(llm: AsyncLLM, workers: int) -> None:
    async def some(pool: WorkerPool) -> None:
        preparing = [pool.prepare(ENDPOINT, body(n=i), f"{i % 2}") for i in range(1, 9)]
        results = await asyncio.gather(*preparing)
        assert [prepared.request.params.n for prepared in results] == list(range(1, 9))
        long = body(prompt="a" * 10**6)
        with pytest.raises((ApiError, TooLongError), match="shorten it"):
            await pool.prepare(ENDPOINT, long, "me")
        with pytest.raises(ApiError, match="temperature"):
            await pool.prepare(ENDPOINT, body(temperature="x"), "me")
        assert len(pool) == 0

    run(llm, some, workers)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_questions_are_answered_there_too(llm: AsyncLLM, workers: int) -> None:
    async def ask(pool: WorkerPool) -> None:
        data = json.dumps({"prompt": "def f("}).encode()
        answer = json.loads((await pool.answer(TOKENIZE, data, "a")).json)
        assert llm.tokenizer is not None
        assert answer["tokens"] == llm.tokenizer.encode("def f(")
        with pytest.raises(ApiError, match="prompt"):
            await pool.answer(TOKENIZE, b"{}", "a")

    run(llm, ask, workers)


@pytest.mark.long
def test_a_worker_that_takes_too_long_is_replaced(llm: AsyncLLM) -> None:
    async def hang(pool: WorkerPool) -> None:
        (pid,) = pool.pids
        await pool.prepare(ENDPOINT, body(), "a")
        os.kill(pid, signal.SIGSTOP)  # as if it were busy for ever
        with pytest.raises(ApiError, match="takes too long") as caught:
            await pool.prepare(ENDPOINT, body(), "a")
        assert caught.value.status == 413
        assert (await pool.prepare(ENDPOINT, body(), "b")).model == "m"
        assert pool.pids != [pid]

    run(llm, hang, 1, limit=0.3)


@pytest.mark.long
def test_a_worker_that_dies_takes_one_body_along(llm: AsyncLLM) -> None:
    async def die(pool: WorkerPool) -> None:
        await pool.prepare(ENDPOINT, body(), "a")
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.ensure_future(pool.prepare(ENDPOINT, body(), "a"))
        second = asyncio.ensure_future(pool.prepare(ENDPOINT, body(), "b"))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="cannot be read"):
            await first
        assert (await second).model == "m"

    run(llm, die, 1)


@pytest.mark.long
def test_a_disconnect_ends_the_work_on_its_body(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)

    async def leave(pool: WorkerPool) -> None:
        await pool.prepare(ENDPOINT, body(), "a")
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        running, waiting = (
            asyncio.ensure_future(pool.prepare(ENDPOINT, body(), "a")) for _ in "12"
        )
        await asyncio.sleep(0.01)
        assert len(pool) == 1
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(pool) == 0
        running.cancel()
        await pool.prepare(ENDPOINT, body(), "b")
        assert pool.pids != [pid]

    run(llm, leave, 1, limit=600.0)


@pytest.mark.long
def test_one_worker_is_kept_for_small_bodies(llm: AsyncLLM) -> None:
    async def both(pool: WorkerPool) -> None:
        await asyncio.gather(*(pool.prepare(ENDPOINT, body(), "x") for _ in range(4)))
        _, large = pool.pids
        os.kill(large, signal.SIGSTOP)
        text = body(prompt="a b " * (SMALL_BODY_BYTES // 4))
        slow = [
            asyncio.ensure_future(pool.prepare(ENDPOINT, text, "greedy"))
            for _ in range(3)
        ]
        for client in ("greedy", "other"):
            assert await pool.prepare(ENDPOINT, body(), client)
        assert not any(task.done() for task in slow)
        os.kill(large, signal.SIGCONT)
        outcomes = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(outcome, ApiError) for outcome in outcomes)

    run(llm, both, 2)


@pytest.mark.long
def test_waiting_bodies_fail_when_the_pool_closes(llm: AsyncLLM) -> None:
    async def close(pool: WorkerPool) -> None:
        await pool.prepare(ENDPOINT, body(), "a")
        os.kill(pool.pids[0], signal.SIGSTOP)
        waiting = [
            asyncio.ensure_future(pool.prepare(ENDPOINT, body(), "a")) for _ in "12"
        ]
        await asyncio.sleep(0.01)
        pool.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 2
        with pytest.raises(EngineDeadError):
            await pool.prepare(ENDPOINT, body(), "a")

    run(llm, close, 1)


def test_without_any_worker_there_are_threads(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = mock.Mock()
    monkeypatch.setattr(module, "_log", log)
    monkeypatch.setattr("minfer.effects.serving.input_workers.process.MODULE", "no.such")

    async def none(pool: WorkerPool) -> None:
        result: PreparedRequest = await pool.prepare(ENDPOINT, body(), "a")
        assert result.model == "m"
        assert pool.pids == []

    run(llm, none, 1)
    assert log.exception.call_count == 1


@pytest.mark.long
def test_a_worker_that_has_grown_is_replaced(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a body leaves behind in its memory goes with it."""

    def grown(data: bytes) -> WorkerReply:
        reply = decode_reply(data)
        return attrs.evolve(reply, last=reply.prepared is not None)

    monkeypatch.setattr(process, "decode_reply", grown)

    async def grow(pool: WorkerPool) -> None:
        pids_seen = set()
        for _ in range(2):
            pids_seen.update(pool.pids)
            assert (await pool.prepare(ENDPOINT, body(), "a")).model == "m"
        assert len(pids_seen) == 2

    run(llm, grow, 1)


def test_the_recipe_is_plain(llm: AsyncLLM) -> None:
    kinds = {type(value) for value in attrs.asdict(ModelFacts.of(llm, ("m",))).values()}
    assert kinds <= {str, int, bool, bytes, dict, tuple, type(None)}
