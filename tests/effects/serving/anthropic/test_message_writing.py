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
    answer_writer = made(stream=True)
    events = [event for char in text for event in answer_writer.write(0, delta(char))]
    events += [
        *answer_writer.write(0, delta("", end)),
        *answer_writer.end(served(3, 5, 0)),
    ]
    bodies = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [body["type"] for body in bodies]
    return bodies


def whole(text: str, end: str) -> dict[str, Any]:
    answer_writer = made(stream=False)
    answer_writer.write(0, delta(text, end))
    (event,) = answer_writer.end(served(3, 5, 0))
    message: dict[str, Any] = json.loads(event.data)
    return message


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, each of which is open by itself."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    running = None
    for event in events:
        if event["type"] == "content_block_start":
            assert (running, event["index"]) == (None, len(blocks))
            running = event["index"]
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == running
            kind = event["delta"].pop("type")
            for name, fragment in event["delta"].items():
                if kind == "input_json_delta":
                    arguments[running] = arguments.get(running, "") + fragment
                else:
                    blocks[running][name] += fragment
        elif event["type"] == "content_block_stop":
            assert event["index"] == running
            running = None
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in block.items() if k != "id"} for block in blocks]


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
    message = whole(text, "length")
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == "max_tokens"


def test_a_call_that_goes_wrong_is_none() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    message = whole(text, "stop")
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == "end_turn"
    assert streamed(text, "stop")[-2]["delta"]["stop_reason"] == "end_turn"
