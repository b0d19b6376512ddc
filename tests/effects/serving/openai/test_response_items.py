"""Items of a response with reasoning and calls, as OpenAI's SDK puts them together."""

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
from minfer.effects.text.tools.formats import Parsing
from minfer.records.request import SamplingParams
from tests.effects.scripted import hermes
from tests.effects.serving.openai.helpers import delta, served

ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = "<think>So</think>Yes" + hermes(("f", {"a": 1}), ("g", {})) + "Done"


def written(text: str, *, stream: bool, end: str = "stop") -> list[Any]:
    request = GenerationRequest(
        prompts=(TokenizedPrompt(None, [1]),),
        params=SamplingParams(),
        urgency=SchedulingHints(),
        stream=stream,
        include=Include(),
        parsing=Parsing(tools="hermes", reasoning="think", names=("f",)),
    )
    writing = writer(Stamp("resp-1", "m", 5), request, None)
    pieces = list(text) if stream else [text]
    events = [event for piece in pieces[:-1] for event in writing.write(0, delta(piece))]
    events += writing.write(0, delta(pieces[-1], end))
    return [json.loads(event.data) for event in [*events, *writing.end(served(10, 3, 4))]]


def without_ids(items: list[Any]) -> list[Any]:
    return [
        {k: v for k, v in item.items() if k not in ("call_id", "id")} for item in items
    ]


def test_a_stream_adds_up_to_the_whole() -> None:
    (last,) = written(TEXT, stream=True)[-1:]
    (solo,) = written(TEXT, stream=False)
    items = last["response"]["output"]
    assert without_ids(items) == without_ids(solo["output"])
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["type"] for item in items] == kinds
    assert len({item["id"] for item in items}) == len(items)
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "So"}]
    assert [item["arguments"] for item in items[2:4]] == ['{"a": 1}', "{}"]
    parsed = Response.model_validate(solo)
    assert parsed.output_text == "Yes\n\nDone"


def test_events_are_the_sdks_and_each_item_is_whole() -> None:
    events = written(TEXT, stream=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    running: dict[int, str] = {}
    finished: list[Any] = []
    for event in events:
        extra = ANY_EVENT.validate_python(event).model_extra
        # OpenAI's description has it, and its SDK does not.
        named = event["type"] == "response.function_call_arguments.done"
        assert set(extra or ()) == ({"name"} if named else set())
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(finished)
            running = {event["output_index"]: ""}
        elif event["type"] == "response.output_item.done":
            finished.append(event["item"])
            running = {}
        elif "output_index" in event:
            assert event["output_index"] in running
            if event["type"].endswith(".delta"):
                running[event["output_index"]] += event["delta"]
            elif event["type"] == "response.function_call_arguments.done":
                assert event["arguments"] == running[event["output_index"]]
    assert finished == events[-1]["response"]["output"]


def test_a_call_that_breaks_off_is_incomplete() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1'
    response = written(text, stream=True, end="length")[-1]["response"]
    (call,) = response["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a": [1')
    assert response["status"] == "incomplete"


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_call_that_is_none_is_text_in_a_response_in_one_piece(end: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, oops'
    (response,) = written(text, stream=False, end=end)
    (message,) = response["output"]
    assert message["content"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_there_is_always_an_item(stream: bool) -> None:
    last = written("<think>", stream=stream)[-1]
    response = last["response"] if stream else last
    (message,) = response["output"]
    assert message["content"][0]["text"] == ""
