"""What tests of OpenAI's endpoints ask for, and read of the answers."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from attrs import evolve
from pydantic import BaseModel

from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.chat_completions import ENDPOINT as CHAT
from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.completions import ENDPOINT as COMPLETIONS
from minfer.effects.serving.openai.completions import CompletionBody
from minfer.effects.serving.protocol import AnswerWriter, PromptUsage
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput, Logprob, RequestMetrics
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsing
from minfer.records.request import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
HI = [{"role": "user", "content": "hi"}]
STAMP = Stamp("an-id", "m", 5)


def completion(**fields: Any) -> CompletionBody:
    return read_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return read_body(ChatBody, json.dumps({"messages": HI, **fields}).encode())


def message(**fields: Any) -> ChatBody:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


def refused(kind: type[BaseModel], data: bytes) -> ApiError:
    """What is told of a body that cannot be read."""
    with pytest.raises(ApiError) as caught:
        read_body(kind, data)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400
    return caught.value


def writer_of(
    body: ChatBody | CompletionBody,
    tokenizer: Tokenizer | None = None,
    echo: Sequence[str] = (),
    parsing: Parsing | None = None,
) -> AnswerWriter:
    """What writes the answer to a body that has one prompt, or as many as echoes."""
    endpoint = CHAT if isinstance(body, ChatBody) else COMPLETIONS
    prompts = [TokenizedPrompt(None, [5])] * max(1, len(echo))
    request = body.request(prompts, SamplingParams(n=body.n), echo)
    return endpoint.writer(STAMP, evolve(request, parsing=parsing), tokenizer)


def delta(
    text: str, end: str | None = None, scores: Sequence[dict[int, Logprob]] | None = None
) -> CompletionOutput:
    """What is new of a choice."""
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=[],
        finish_reason=end,
        logprobs=None if scores is None else list(scores),
    )


def served(prompt: int, output: int, cached: int) -> list[PromptUsage]:
    """What one prompt took, in tokens."""
    return [
        PromptUsage(
            prompt, cached, RequestMetrics(arrival_time=0.0, output_tokens=output)
        )
    ]


def read(events: Iterable[StreamEvent]) -> list[Any]:
    """What events say; none has a name."""
    assert not any(event.name for event in events)
    data = [event.data for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
