"""A worker replies whatever it is asked, and loads nothing that an engine needs."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from attrs import evolve

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.net.framing import FrameReader, frame
from minfer.effects.serving.input_workers import worker_loop
from minfer.effects.serving.input_workers import worker_main as module
from minfer.effects.serving.input_workers.task import ModelFacts
from minfer.effects.serving.input_workers.worker_loop import serve
from minfer.effects.serving.input_workers.worker_main import InputWorker
from minfer.effects.serving.input_workers.worker_messages import (
    MAX_MESSAGE_BYTES,
    WorkerReply,
    WorkerRequest,
    decode_reply,
    encode,
)
from tests.effects.test_imports import loaded_by

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def worker() -> Iterator[InputWorker]:
    with contextlib.closing(AsyncLLM(executor="dry")) as llm:
        yield InputWorker(ModelFacts.of(llm, ("bundled",)))


def reply_to(worker: InputWorker, **body: object) -> WorkerReply:
    return worker.reply(WorkerRequest(path=PATH, data=json.dumps(body).encode()))


@pytest.mark.long
def test_it_needs_no_torch() -> None:
    code = "import minfer.effects.serving.input_workers.worker_main"
    assert not {"torch", "transformers", "safetensors"} & loaded_by(code)


def test_a_refusal_has_the_parts_of_the_error(worker: InputWorker) -> None:
    error = reply_to(worker, prompt="x", temperature=-1).refusal
    assert error is not None
    assert (error.status, error.param) == (400, "temperature")
    error = reply_to(worker, prompt="a" * 10**6).refusal
    assert error is not None
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")


def test_names_of_adapters_are_looked_up_later(worker: InputWorker) -> None:
    error = reply_to(worker, prompt="x", model="sql").refusal
    assert error is not None
    assert error.code == "model_not_found"
    facts = evolve(worker._model_info.facts, takes_adapters=True)
    reply = reply_to(InputWorker(facts), prompt="x", model="sql")
    assert reply.prepared is not None
    assert (reply.prepared.model, reply.prepared.request.adapter) == ("sql", "")


def test_a_prompt_that_is_too_long_does_not_travel(worker: InputWorker) -> None:
    assert reply_to(worker, prompt=[5] * 2047).prepared is not None
    error = reply_to(worker, prompt=[[5], [5] * 2048]).refusal
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert "the prompt has 2048 tokens" in error.message


@pytest.mark.parametrize(
    ("path", "body"),
    [(PATH, {"max_tokens": 0}), ("/v1/embeddings", {})],
    ids=["scored", "pooled"],
)
def test_a_prompt_without_output_may_fill_the_context(
    worker: InputWorker, path: str, body: dict[str, object]
) -> None:
    field = "input" if path != PATH else "prompt"

    def reply(length: int) -> WorkerReply:
        data = json.dumps({field: [5] * length, **body}).encode()
        return worker.reply(WorkerRequest(path=path, data=data))

    assert reply(2048).prepared is not None
    error = reply(2049).refusal
    assert error is not None
    assert "the prompt has 2049 tokens" in error.message
    assert "left for the output" not in error.message


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [(KeyError("secret"), 500, False), (MemoryError("secret"), 413, True)],
)
def test_an_internal_error_is_not_reported_to_the_client(
    worker: InputWorker,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    last: bool,
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "work", broken)
    reply = reply_to(worker, prompt="x")
    assert reply.refusal is not None
    assert (reply.refusal.status, reply.last) == (status, last)
    assert "secret" not in reply.refusal.message


def test_it_ends_when_it_has_grown(
    worker: InputWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.alarm", lambda _: 0)  # of the main thread
    our_end, worker_end = socket.socketpair()
    with our_end, worker_end:
        thread = threading.Thread(target=serve, args=(worker_end, worker))
        thread.start()
        reader = FrameReader(MAX_MESSAGE_BYTES)
        (ready,) = reader.feed(our_end.recv(1000))
        assert decode_reply(ready) == WorkerReply()
        for growth, last in ((2**40, False), (-(2**50), True)):
            monkeypatch.setattr(worker_loop, "_size", lambda _, growth=growth: -growth)
            ask = encode(WorkerRequest(path=PATH, data=b'{"prompt": [5]}'))
            our_end.sendall(frame(ask))
            (data,) = reader.feed(our_end.recv(10_000))
            assert decode_reply(data).last is last
        thread.join(10)
        assert not thread.is_alive()
