"""Messages as Anthropic's own SDK reads them, whole and streamed."""

import json
from typing import Any

import anthropic as sdk
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.anthropic.create_message import ENDPOINT
from minfer.effects.serving.protocol import AnswerWriter, GenerationRequest, Include
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.text.outputs import CompletionOutput
from minfer.records.request import SamplingParams
from tests.effects.served import Serving
from tests.effects.serving.anthropic.helpers import HI, body, refused
from tests.effects.serving.openai.helpers import served

REQUESTED: dict[str, Any] = {
    "model": "bundled",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Write a Python function is_prime."}],
    "system": "You write Python.",
    "extra_body": {"temperature": 0},
}


def text_of(message: Message) -> str:
    """The text of a message, which is its one block."""
    (block,) = message.content
    assert block.type == "text"
    return block.text


def input_of(message: Message) -> int:
    """How many tokens were read, from the cache or not."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_whole_answer(anthropic: Anthropic, bundled: Serving) -> None:
    message = anthropic.messages.create(**REQUESTED)
    assert message.id.startswith("msg-")
    assert (message.type, message.role, message.model) == (
        "message",
        "assistant",
        "bundled",
    )
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    chat = bundled.post(
        "chat/completions",
        messages=[
            {"role": "system", "content": REQUESTED["system"]},
            *REQUESTED["messages"],
        ],
        max_tokens=12,
        temperature=0,
    ).json()
    assert text_of(message) == chat["choices"][0]["message"]["content"]
    assert message.usage.output_tokens == 12
    assert input_of(message) == chat["usage"]["prompt_tokens"]


def test_a_stream_adds_up_to_the_whole(anthropic: Anthropic) -> None:
    message = anthropic.messages.create(**REQUESTED)
    with anthropic.messages.stream(**REQUESTED) as stream:
        assert "".join(stream.text_stream) == text_of(message)
        streamed = stream.get_final_message()
    assert text_of(streamed) == text_of(message)
    assert streamed.stop_reason == message.stop_reason
    assert streamed.usage.output_tokens == message.usage.output_tokens
    assert input_of(streamed) == input_of(message)


def test_events_come_in_order(bundled: Serving) -> None:
    request_fields = {**REQUESTED, "stream": True}
    del request_fields["extra_body"]
    answer = bundled.post("messages", **request_fields)
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    parted = [frame.split("\n") for frame in frames]
    names = [name.removeprefix("event: ") for name, _ in parted]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in parted]
    assert names == [event["type"] for event in bodies]
    # A model that may think or call tells at first what its first block is.
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = bodies[0]["message"]
    assert started["content"] == []
    assert started["usage"]["input_tokens"] > 0
    assert answer.headers["x-request-id"] == started["id"]


def test_a_stop_sequence_is_named(anthropic: Anthropic) -> None:
    text = text_of(anthropic.messages.create(**REQUESTED))
    stop = text[2:5]
    message = anthropic.messages.create(**REQUESTED, stop_sequences=["§§", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def writer(stream: bool) -> AnswerWriter:
    request = GenerationRequest(
        prompts=(TokenizedPrompt(None, [1, 2, 3]),),
        params=SamplingParams(),
        urgency=SchedulingHints(),
        stream=stream,
        include=Include(),
    )
    return ENDPOINT.writer(Stamp("msg-1", "m", 5), request, None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_word_is_whole_nevertheless(stream: bool) -> None:
    answer_writer = writer(stream)
    last = CompletionOutput(index=0, text="", token_ids=[5], finish_reason="stop")
    events = [*answer_writer.write(0, last), *answer_writer.end(served(10, 1, 4))]
    bodies = [json.loads(event.data) for event in events]
    counted = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    if stream:
        assert [event["type"] for event in bodies] == [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert bodies[0]["message"]["usage"] == {"input_tokens": 3, "output_tokens": 0}
        assert (bodies[4]["delta"], bodies[4]["usage"]) == (ended, counted)
    else:
        (message,) = bodies
        assert message["content"] == [{"type": "text", "text": ""}]
        assert message["usage"] == counted
        assert message.items() >= ended.items()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"stop_sequences": "x"}, "stop_sequences", "must be a list"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "at least 1"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64 items"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences[0]", "at most 1024"),
        ({"top_k": -1}, "top_k", "must be at least 0"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id", "must be a string"),
        ({"stream": "yes"}, "stream", "must be true or false"),
    ],
)
def test_a_field_that_makes_no_sense(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(**fields)
    assert error.param == param
    assert words in str(error)


def test_requested_parameters_reach_the_engine(bundled: Serving) -> None:
    request_fields = body(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
    )
    request = request_fields.generation(bundled.llm)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
    assert (params.stop, params.max_tokens, params.n) == (("x",), 5, 1)
    assert request.urgency.client == "u"


def test_errors_are_anthropics(anthropic: Anthropic, bundled: Serving) -> None:
    with pytest.raises(
        sdk.BadRequestError, match=r"prompt is too long: .* maximum context"
    ):
        anthropic.messages.create(
            model="bundled",
            max_tokens=5,
            messages=[{"role": "user", "content": "a " * 3000}],
        )
    with pytest.raises(sdk.NotFoundError) as missing:
        anthropic.messages.create(model="claude", max_tokens=5, messages=HI)
    assert missing.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "there is no model 'claude' here; there is bundled, alias/of-it",
        },
    }
    wrong = bundled.get("/v1/messages")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["type"] == "error"
    unread = bundled.http.post(f"{bundled.url}/v1/messages", content=b"x")
    assert (unread.status_code, unread.json()["type"]) == (415, "error")
