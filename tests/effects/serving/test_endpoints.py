"""A protocol is one module and one row: here one of the tests' own, with named events."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from attrs import frozen

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import read_prompt
from minfer.effects.serving import application
from minfer.effects.serving.application import Application
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.protocol import (
    AnswerWriter,
    Endpoint,
    GenerationRequest,
    Include,
    ModelInfo,
    PromptUsage,
)
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Failure, StreamEvent
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.request import SamplingParams
from tests.effects.serving.raw_requests import asgi

# --- what would be a protocol's module --------------------------------------------------


@frozen
class Telegram:
    """Its body is the prompt, and nothing else can be asked for."""

    prompt: str
    stream: bool = True
    model: str | None = None

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        size = llm.setup.spec.vocab_size
        return GenerationRequest(
            prompts=(read_prompt(self.prompt, llm.tokenizer, size),),
            params=SamplingParams(max_tokens=5),
            urgency=SchedulingHints(),
            stream=self.stream,
            include=Include(),
        )


class TelegramWriter:
    def __init__(self, stamp: Stamp) -> None:
        self.begun = False
        self.stamp = stamp

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        begin = [] if self.begun else [StreamEvent(self.stamp.id, "begin")]
        self.begun = True
        return [*begin, StreamEvent(json.dumps([choice, delta.text]), "words")]

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        return [StreamEvent(str(served[0].metrics.output_tokens), "end")]


def read(data: bytes) -> Telegram:
    if not data.startswith(b'"'):
        raise ApiError("STOP STRINGS ONLY STOP")
    return Telegram(json.loads(data))


def writer(stamp: Stamp, request: GenerationRequest, _: Tokenizer | None) -> AnswerWriter:
    assert request.stream
    return TelegramWriter(stamp)


def failure(error: ApiError) -> Failure:
    return Failure(error.status, StreamEvent(f"STOP {error.param} STOP", "error"))


TELEGRAM: Final = Endpoint(
    name="telegrams",
    path="/telegrams",
    id_prefix="telegram",
    prompt_field="the whole",
    read=read,
    writer=writer,
    failure=failure,
)


# --- its row, and what it does ----------------------------------------------------------


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setattr(application, "ENDPOINTS", (*ENDPOINTS, TELEGRAM))
    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        yield Application(llm, ["dry"])


def posted(app: Application, content: Any) -> tuple[int, str]:
    start, *messages = asyncio.run(asgi(app, TELEGRAM.path, json.dumps(content).encode()))
    return start["status"], b"".join(message["body"] for message in messages).decode()


def test_its_answer_is_its_own_over_a_transport_that_was_there(app: Application) -> None:
    status, text = posted(app, "hello")
    assert status == 200
    first, *words, last = text.removesuffix("\n\n").split("\n\n")
    assert first.startswith("event: begin\ndata: telegram-")
    assert all(event.startswith("event: words\ndata: [0, ") for event in words)
    assert last == "event: end\ndata: 5"


def test_its_failures_are_its_own(app: Application) -> None:
    assert posted(app, ["no string"]) == (400, "STOP None STOP")
    assert posted(app, "") == (400, "STOP the whole STOP")  # of the engine's, prepared
    assert posted(app, "long " * 10**4) == (400, "STOP the whole STOP")  # in a thread


def test_rows_do_not_collide() -> None:
    for field in ("name", "path", "id_prefix"):
        assert len({getattr(endpoint, field) for endpoint in ENDPOINTS}) == len(ENDPOINTS)
    paths = {endpoint.path for endpoint in ENDPOINTS} | {
        endpoint.path for endpoint in QUERY_ENDPOINTS
    }
    assert len(paths) == len(ENDPOINTS) + len(QUERY_ENDPOINTS)
