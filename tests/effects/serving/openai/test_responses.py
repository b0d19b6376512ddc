"""Responses as OpenAI's SDK reads them, and which items may be sent."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import refused

QUESTION = "Write a Python function is_prime."
REQUESTED: dict[str, Any] = {
    "model": "bundled",
    "input": QUESTION,
    "instructions": "You write Python.",
    "temperature": 0,
    "max_output_tokens": 16,
}


@pytest.mark.long
def test_a_whole_response(client: OpenAI, bundled: Serving) -> None:
    response = client.responses.create(
        **REQUESTED, metadata={"a": "b"}, user="me", store=True
    )
    assert response.id.startswith("resp-")
    assert response._request_id == response.id
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    repeated = (
        response.instructions,
        response.metadata,
        response.user,
        response.temperature,
    )
    assert repeated == (REQUESTED["instructions"], {"a": "b"}, "me", 0)
    assert response.model_extra == {"store": False}  # nothing is
    messages = [{"role": "system", "content": REQUESTED["instructions"]}]
    chat = bundled.post(
        "chat/completions",
        messages=[*messages, {"role": "user", "content": QUESTION}],
        max_tokens=16,
        temperature=0,
    ).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == 16
    assert usage.total_tokens == usage.input_tokens + 16
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.long
def test_a_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    response = client.responses.create(**REQUESTED)
    events: list[ResponseStreamEvent] = list(
        client.responses.create(**REQUESTED, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == response.output_text
    texts = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text
    assert same(last.response) == same(response)


def same(response: Response) -> dict[str, Any]:
    """What of a response is the same, however it comes."""
    changing = {"id", "created_at", "output", "usage"}
    return response.model_dump(exclude=changing)


@pytest.mark.long
def test_the_sdk_puts_a_stream_together(client: OpenAI) -> None:
    request_fields = {**REQUESTED, "max_output_tokens": 200}
    with client.responses.stream(**request_fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    response = client.responses.create(**request_fields)
    assert final.status == response.status == "completed"
    assert final.output_text == response.output_text


@pytest.mark.long
def test_a_response_is_handed_back_with_the_next_question(client: OpenAI) -> None:
    first = client.responses.create(**REQUESTED)
    question = {"role": "user", "content": QUESTION}
    follow_up: Any = {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}
    items: Any = [question, *(item.model_dump() for item in first.output), follow_up]
    second = client.responses.create(**{**REQUESTED, "input": items})
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


def body(**fields: Any) -> bytes:
    return json.dumps({"input": "x", **fields}).encode()


def item(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", **fields}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "must have at least 1"),
        ({"input": [5]}, "input[0]", "must be an object"),
        (
            {"input": [{"type": "computer_call", "call_id": "x"}]},
            "input[0].type",
            '"computer_call" is not supported; there is "message"',
        ),
        ({"input": [item(role="tool")]}, "input[0].role", "must be 'system'"),
        (
            {"input": [item(content=[{"type": "input_image", "image_url": "x"}])]},
            "input[0].content[0].type",
            '"input_image" is not supported: models read text here, multimodal ones too',
        ),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "is not supported"),
        ({"conversation": "c"}, "conversation", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "is not supported"),
        (
            {"reasoning": {"effort": "much"}},
            "reasoning.effort",
            "must be 'none', 'minimal'",
        ),
        ({"truncation": "all"}, "truncation", "must be 'auto' or 'disabled'"),
        (
            {"text": {"format": {"type": "xml"}}},
            "text.format.type",
            '"xml" is not supported',
        ),
        (
            {"include": ["message.output_text.logprobs"]},
            "include",
            "message.output_text.logprobs",
        ),
        ({"include": 5}, "include", "must be a list"),
        ({"include": [5]}, "include[0]", "must be a string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"metadata": {"a": 5}}, "metadata.a", "must be a string"),
        ({"messages": []}, "messages", "is not a field here"),
    ],
)
def test_a_refused_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(ResponsesBody, body(**fields))
    assert error.param == param
    assert words in str(error)


def test_what_asks_for_nothing_is_accepted(bundled: Serving) -> None:
    response = bundled.post(
        "responses",
        input=[item(type="message", role="developer", status="completed", id="x")],
        max_output_tokens=1,
        tools=[],
        tool_choice="auto",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "medium"},
        truncation="disabled",
        reasoning={"effort": None},
        stream_options={"include_obfuscation": False},
        service_tier="auto",
    )
    assert response.status_code == 200


def test_vllms_sampling_parameters_are_taken() -> None:
    sampling_fields: dict[str, Any] = {
        "ignore_eos": True,
        "stop": "x",
        "seed": 5,
        "top_k": 3,
        "repetition_penalty": 1.5,
        "temperature": 0.5,
    }
    other_fields = {"request_id": "mine", "cache_salt": "s", "priority": 1}
    read = read_body(ResponsesBody, body(**sampling_fields, **other_fields))
    assert read.sampling() == {**sampling_fields, "stop": ["x"]}
    assert refused(ResponsesBody, body(ignore_eos=1)).param == "ignore_eos"


def test_errors(client: OpenAI, bundled: Serving) -> None:
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is"
    ) as caught:
        client.responses.create(model="bundled", input="a " * 3000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt", input="x")
    assert bundled.get("/v1/responses/resp-1").status_code == 404  # nothing is stored
