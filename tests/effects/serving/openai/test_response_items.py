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
    made = writer(Stamp("resp-1", "m", 5), request, None)
    pieces = list(text) if stream else [text]
    events = [event for one in pieces[:-1] for event in made.write(0, delta(one))]
    events += made.write(0, delta(pieces[-1], end))
    return [json.loads(one.data) for one in [*events, *made.end(served(10, 3, 4))]]


def without_ids(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in one.items() if k not in ("call_id", "id")} for one in items]


def test_a_stream_adds_up_to_the_whole() -> None:
    (whole,) = written(TEXT, stream=True)[-1:]
    (solo,) = written(TEXT, stream=False)
    items = whole["response"]["output"]
    assert without_ids(items) == without_ids(solo["output"])
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [one["type"] for one in items] == kinds
    assert len({one["id"] for one in items}) == len(items)
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "So"}]
    assert [one["arguments"] for one in items[2:4]] == ['{"a": 1}', "{}"]
    parsed = Response.model_validate(solo)
    assert parsed.output_text == "Yes\n\nDone"


def test_events_are_the_sdks_and_each_item_is_whole() -> None:
    item_json = written(TEXT, stream=True)
    assert [one["sequence_number"] for one in item_json] == list(range(len(item_json)))
    running: dict[int, str] = {}
    done: list[Any] = []
    for one in item_json:
        extra = ANY_EVENT.validate_python(one).model_extra
        # OpenAI's description has it, and its SDK does not.
        named = one["type"] == "response.function_call_arguments.done"
        assert set(extra or ()) == ({"name"} if named else set())
        if one["type"] == "response.output_item.added":
            assert one["output_index"] == len(done)
            running = {one["output_index"]: ""}
        elif one["type"] == "response.output_item.done":
            done.append(one["item"])
            running = {}
        elif "output_index" in one:
            assert one["output_index"] in running
            if one["type"].endswith(".delta"):
                running[one["output_index"]] += one["delta"]
            elif one["type"] == "response.function_call_arguments.done":
                assert one["arguments"] == running[one["output_index"]]
    assert done == item_json[-1]["response"]["output"]


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
