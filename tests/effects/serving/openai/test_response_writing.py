"""Events of a response: each is in OpenAI's own description, and none is left out."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.openai.response_writing import writer
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.records.request import SamplingParams
from tests.effects.serving.openai.helpers import delta, served

ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def written(stream: bool, *texts: str, end: str) -> list[StreamEvent]:
    """All events of a response whose text comes in these pieces."""
    request = GenerationRequest(
        prompts=(TokenizedPrompt(None, [1]),),
        params=SamplingParams(temperature=0.5),
        urgency=SchedulingHints(),
        stream=stream,
        include=Include(repeat={"metadata": {"a": "b"}, "instructions": None}),
    )
    writing = writer(Stamp("resp-1", "m", 5), request, None)
    events = []
    for text in texts[:-1] if stream else ():
        events += writing.write(0, delta(text))
    last = texts[-1] if stream else "".join(texts)
    return [*events, *writing.write(0, delta(last, end)), *writing.end(served(10, 3, 4))]


@pytest.mark.parametrize(
    ("end", "status"), [("stop", "completed"), ("length", "incomplete")]
)
def test_events_come_in_order(end: str, status: str) -> None:
    events = written(True, "a", "b", "", end=end)
    bodies = [json.loads(event.data) for event in events]
    names = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{status}",
    ]
    assert [event.name for event in events] == [body["type"] for body in bodies] == names
    assert [body["sequence_number"] for body in bodies] == list(range(10))
    assert bodies[4]["delta"] + bodies[5]["delta"] == bodies[6]["text"] == "ab"
    assert bodies[0]["response"]["status"] == "in_progress"
    assert "usage" not in bodies[0]["response"]  # which is null for SDKs
    last = bodies[-1]["response"]
    assert (last["status"], last["output"][0]["status"]) == (status, status)
    assert last["output"][0] == bodies[8]["item"]
    ids = {body["item_id"] for body in bodies[3:8]} | {bodies[2]["item"]["id"]}
    assert ids == {"msg-1"}


def test_sdk_and_events_agree() -> None:
    for event in written(True, "a", "", end="stop"):
        parsed = ANY_EVENT.validate_json(event.data, strict=True)
        assert parsed.type == event.name
        assert not parsed.model_extra  # it knows every field


def test_a_response_in_one_piece() -> None:
    (event,) = written(False, "a", "b", end="stop")
    response = Response.model_validate_json(event.data, strict=True)
    assert response.model_extra == {"store": False}  # the SDK knows every other field
    assert response.output_text == "ab"
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.temperature, response.metadata) == (0.5, {"a": "b"})
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (10, 4)
    assert (usage.output_tokens, usage.total_tokens) == (3, 13)


def test_a_response_without_a_word() -> None:
    bodies = [json.loads(event.data) for event in written(True, "", end="stop")]
    assert [body["type"] for body in bodies].count("response.output_text.delta") == 0
    assert bodies[-1]["response"]["output"][0]["content"][0]["text"] == ""
