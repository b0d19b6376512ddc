"""Blocks of calls and results, as chat templates take them."""

from typing import Any

import pytest

from minfer.effects.serving.anthropic.blocks import offered_tools, turns_of
from minfer.effects.serving.request_parsing.tool_constraints import CallRequirements
from tests.effects.serving.anthropic.helpers import HI, body, refused

USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": [1, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
TEXT = {"type": "text", "text": "x"}
CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": [1, None]}},
}


def turns(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    (_, turn) = body(messages=[*HI, {"role": role, "content": list(blocks)}]).messages
    return turns_of(turn.role, [turn.content])


def test_calls_are_of_the_message_around_them() -> None:
    plain = {"role": "assistant", "content": [TEXT]}
    assert turns("assistant", TEXT, USE) == [{**plain, "tool_calls": [CALL]}]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    (turn,) = turns("assistant", thought, TEXT, USE)
    assert turn["reasoning_content"] == "hm"
    assert turns("assistant", USE)[0]["content"] is None
    for cut in ('{"a": [1', ""):
        (call,) = turns("assistant", {**USE, "input": cut})[0]["tool_calls"]
        assert call["function"]["arguments"] == cut


def test_results_are_messages_of_their_own() -> None:
    message = {"role": "tool", "tool_call_id": "t1", "content": "5"}
    assert turns("user", RESULT) == [message]
    parts = {**RESULT, "content": [TEXT, TEXT], "is_error": True}
    both = [{**message, "content": [TEXT, TEXT]}, {"role": "user", "content": [TEXT]}]
    assert turns("user", TEXT, parts) == both
    nothing = {"type": "tool_result", "tool_use_id": "t1"}
    assert turns("user", nothing) == [{**message, "content": ""}]


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("user", USE, "type"),
        ("assistant", RESULT, "type"),
        ("assistant", {**USE, "input": 5}, "input"),
        ("assistant", {**USE, "id": ""}, "id"),
        ("user", {**RESULT, "content": [{"type": "image"}]}, "content[0].type"),
        ("user", {"type": "tool_result"}, "tool_use_id"),
        ("user", {"type": 5}, "type"),
    ],
)
def test_what_makes_no_sense(role: str, block: dict[str, Any], param: str) -> None:
    error = refused(messages=[*HI, {"role": role, "content": [block]}])
    assert error.param == f"messages[1].content[0].{param}"


def test_tools_as_templates_take_them() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    tool = {"name": "f", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    reported = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert [one.to_json() for one in body(tools=[tool]).offered] == [reported]
    assert body(tools=[tool], tool_choice={"type": "none"}).offered == []
    (described,) = body(tools=[{**tool, "description": "F."}]).offered
    assert described.to_json()["function"]["description"] == "F."


TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("choice", "requirements"),
    [
        ({"type": "auto"}, CallRequirements()),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            CallRequirements(several=False),
        ),
        ({"type": "any"}, CallRequirements(must=True)),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            CallRequirements(must=True, several=False),
        ),
        (
            {"type": "tool", "name": "f"},
            CallRequirements(must=True, only=frozenset("f"), several=False),
        ),
    ],
)
def test_call_requirements(
    choice: dict[str, Any], requirements: CallRequirements
) -> None:
    given = body(tools=[TOOL], tool_choice=choice).tool_choice
    assert given is not None
    assert given.requirements() == requirements


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}},
            "tool_choice.name",
        ),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ],
)
def test_what_cannot_be_wanted(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_tools_as_they_are_offered() -> None:
    (offer,) = offered_tools(body(tools=[{**TOOL, "strict": True}]).offered)
    assert (offer.name, offer.strict, offer.param) == ("f", True, "tools[0].input_schema")
