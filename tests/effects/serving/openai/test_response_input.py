"""Items with calls, outputs and reasoning, as chat templates take them."""

import json
from typing import Any

import pytest

from minfer.effects.serving.openai.response_input import turns_of
from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from tests.effects.serving.openai.helpers import refused

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs-1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
ASSISTANT = {"role": "assistant", "content": "x"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TEMPLATE_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}


def body(**fields: Any) -> ResponsesBody:
    return read_body(ResponsesBody, json.dumps({"input": "hi", **fields}).encode())


def turns(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return turns_of(body(input=list(items)).input)


def test_what_the_assistant_does_at_once_is_one_message() -> None:
    second = {**CALL, "call_id": "c2", "id": "fc-1", "status": "completed"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    calls = [TEMPLATE_CALL, {**TEMPLATE_CALL, "id": "c2"}]
    assert turns(THOUGHT, ASSISTANT, CALL, second, OUTPUT) == [
        {**ASSISTANT, "reasoning_content": "hm", "tool_calls": calls},
        result,
    ]
    solo = {"role": "assistant", "content": None, "tool_calls": [TEMPLATE_CALL]}
    assert turns(CALL, OUTPUT) == [solo, result]
    assert turns(THOUGHT, CALL) == [{**solo, "reasoning_content": "hm"}]
    behind = {**ASSISTANT, "content": [{"type": "output_text", "text": "y"}]}
    assert turns(ASSISTANT, CALL, behind, OUTPUT) == [
        {**ASSISTANT, "content": "x\n\ny", "tool_calls": [TEMPLATE_CALL]},
        result,
    ]
    assert turns(ASSISTANT, ASSISTANT) == [ASSISTANT, ASSISTANT]


def test_reasoning_that_is_all_there_is_is_a_turn() -> None:
    reasoning = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    user = {"role": "user", "content": "go on"}
    assert turns(THOUGHT, user) == [reasoning, user]
    assert turns(user, THOUGHT) == [user, reasoning]
    assert turns(THOUGHT, THOUGHT, ASSISTANT) == [
        {**ASSISTANT, "reasoning_content": "hm\nhm"}
    ]


SOME: dict[str, Any] = {"type": "allowed_tools", "mode": "required"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "call_id": ""}]}, "input[0].call_id"),
        (
            {"input": [{**THOUGHT, "encrypted_content": 5}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {**TOOL}}, "tool_choice.parameters"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "any"}},
            "tool_choice.mode",
        ),
        (
            {"tools": [TOOL], "tool_choice": {**SOME, "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {**SOME, "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    data = json.dumps({"input": "hi", **fields}).encode()
    assert refused(ResponsesBody, data).param == param


def test_tools_as_templates_take_them() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    (tool,) = body(tools=[TOOL]).offered
    assert tool.to_json() == {"type": "function", "function": function}
    assert tool.tool.to_json()["name"] == "f"
    assert body(tools=[TOOL], tool_choice="none").offered == []


def test_a_summary_of_reasoning_is_named_as_ignored() -> None:
    summary = [{"type": "summary_text", "text": "hm"}]
    for item, names in ((THOUGHT, ()), ({**THOUGHT, "summary": summary}, ("summary",))):
        with collect_ignored() as hints:
            turns(item, ASSISTANT)
        assert hints.names == names
