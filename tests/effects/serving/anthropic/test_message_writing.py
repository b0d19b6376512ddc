"""Events and objects of answers with reasoning and calls."""

import json
from typing import Any

from attrs import evolve

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.anthropic.message_writing import writer
from minfer.effects.serving.protocol import AnswerWriter, GenerationRequest, Include
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.text.tools.formats import Parsing
from minfer.records.request import SamplingParams
from tests.effects.scripted import hermes
from tests.effects.serving.openai.helpers import delta, served

TEXT = "<think>So</think>Yes" + hermes(("add", {"a": 1}), ("now", {}))
PARSING = Parsing(tools="hermes", reasoning="think", names=("add",))
REQUEST = GenerationRequest(
    prompts=(TokenizedPrompt(None, [1, 2, 3]),),
    params=SamplingParams(),
    urgency=SchedulingHints(),
    stream=False,
    include=Include(),
    parsing=PARSING,
)


def made(*, stream: bool) -> AnswerWriter:
    return writer(Stamp("msg-1", "m", 5), evolve(REQUEST, stream=stream), None)


def streamed(text: str, end: str) -> list[dict[str, Any]]:
    one = made(stream=True)
    events = [event for char in text for event in one.write(0, delta(char))]
    events += [*one.write(0, delta("", end)), *one.end(served(3, 5, 0))]
    to_json = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [each["type"] for each in to_json]
    return to_json


def whole(text: str, end: str) -> dict[str, Any]:
    one = made(stream=False)
    one.write(0, delta(text, end))
    (event,) = one.end(served(3, 5, 0))
    to_json: dict[str, Any] = json.loads(event.data)
    return to_json


def added_up(to_json: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, each of which is open by itself."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    running = None
    for one in to_json:
        if one["type"] == "content_block_start":
            assert (running, one["index"]) == (None, len(blocks))
            running = one["index"]
            blocks.append(one["content_block"])
        elif one["type"] == "content_block_delta":
            assert one["index"] == running
            kind = one["delta"].pop("type")
            for name, more in one["delta"].items():
                if kind == "input_json_delta":
                    arguments[running] = arguments.get(running, "") + more
                else:
                    blocks[running][name] += more
        elif one["type"] == "content_block_stop":
            assert one["index"] == running
            running = None
    for at, text in arguments.items():
        blocks[at]["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "id"} for one in blocks]


def test_a_stream_adds_up_to_the_whole() -> None:
    blocks = without_ids(whole(TEXT, "stop")["content"])
    assert blocks == [
        {"type": "thinking", "thinking": "So", "signature": ""},
        {"type": "text", "text": "Yes"},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert without_ids(added_up(streamed(TEXT, "stop"))) == blocks


def test_why_it_ended() -> None:
    for text, end, reason in (
        (TEXT, "stop", "tool_use"),
        (TEXT, "length", "max_tokens"),
        ("Yes", "stop", "end_turn"),
    ):
        assert whole(text, end)["stop_reason"] == reason
        last = streamed(text, end)[-2]
        assert last["delta"]["stop_reason"] == reason


def test_there_is_always_a_block() -> None:
    nothing = [{"type": "text", "text": ""}]
    assert whole("", "stop")["content"] == nothing
    assert added_up(streamed("", "stop")) == nothing


def test_a_call_that_broke_off_is_none() -> None:
    text = 'Yes <tool_call>{"name": "add", "arguments": {"a": [1'
    to_json = whole(text, "length")
    assert to_json["content"] == [{"type": "text", "text": text}]
    assert to_json["stop_reason"] == "max_tokens"


def test_a_call_that_goes_wrong_is_none() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    to_json = whole(text, "stop")
    assert to_json["content"] == [{"type": "text", "text": text}]
    assert to_json["stop_reason"] == "end_turn"
    assert streamed(text, "stop")[-2]["delta"]["stop_reason"] == "end_turn"
