"""Messages with calls and answers to them."""

import json
from typing import Any

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.chat_messages import have_tool_calls
from tests.effects.serving.openai.helpers import HI, chat, refused

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "5"}
FIRST = "messages[1].tool_calls[0]"


def called(**fields: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": "{}", **fields}
    return {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{**CALLS, "tool_calls": [{**CALL, "id": 5}]}], f"{FIRST}.id"),
        ([{**CALLS, "tool_calls": [{**CALL, "type": "custom"}]}], f"{FIRST}.type"),
        ([{**CALLS, "role": "user", "content": "x"}], "messages[1].tool_calls"),
        ([called(name=None)], f"{FIRST}.function.name"),
        ([called(arguments=None)], f"{FIRST}.function.arguments"),
        ([called(arguments={})], f"{FIRST}.function.arguments"),
        ([ANSWER], "messages[1].tool_call_id"),
        ([CALLS, {**ANSWER, "tool_call_id": "c2"}], "messages[2].tool_call_id"),
        ([CALLS, {"role": "tool", "content": "x"}], "messages[2].tool_call_id"),
        ([CALLS, {**ANSWER, "content": None}], "messages[2].content"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[1].role"),
    ],
)
def test_what_makes_no_sense(messages: list[Any], param: str) -> None:
    error = refused(ChatBody, json.dumps({"messages": [*HI, *messages]}).encode())
    assert error.param == param


def test_calls_as_templates_take_them() -> None:
    """Their arguments are text as yet, and no content is null."""
    function = {"name": "add", "arguments": '{"a": [1, null], "b": "ü"}'}
    assistant = {**CALLS, "tool_calls": [{**CALL, "function": function}]}
    body = chat(messages=[*HI, assistant, {**ANSWER, "name": "add"}])
    turns = [message.to_turn() for message in body.messages]
    call = {**CALL, "function": function}
    assert turns == [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "name": "add", "tool_call_id": "c1"},
    ]
    assert have_tool_calls(body.messages)
    assert not have_tool_calls(chat().messages)
    for odd in ("", "{", "[]", '{"a": NaN}', "[" * 10**5):
        assert chat(messages=[*HI, called(arguments=odd)]).messages[1].tool_calls


def test_reasoning_goes_back_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        content = {"role": "assistant", "content": "x", name: "hm"}
        (_, turn) = [
            message.to_turn() for message in chat(messages=[*HI, content]).messages
        ]
        assert turn["reasoning_content"] == "hm"
        solo = {"role": "assistant", "content": None, name: "hm"}
        (_, turn) = [message.to_turn() for message in chat(messages=[*HI, solo]).messages]
        assert (turn["content"], turn["reasoning_content"]) == (None, "hm")
    assert "reasoning_content" not in chat().messages[0].to_turn()
