"""What may be asked of tools, and what chat templates get of them."""

import json
from typing import Any

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.tools import call_requirements, offered_tools
from minfer.effects.serving.request_parsing.tool_constraints import CallRequirements
from tests.effects.serving.openai.helpers import HI, chat, refused

SCHEMA = {"type": "object", "properties": {"a": {"default": None}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}


def tool(**fields: Any) -> list[Any]:
    return [ADD, {"type": "function", "function": {"name": "f", **fields}}]


def some(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    """A choice of some tools."""
    named = [
        {"type": "function", "function": {"name": offered["function"]["name"]}}
        for offered in tools
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


NAMED = {"type": "function", "function": {"name": "add"}}
WHERE = "tools[1].function"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": 5}, "tools", "must be a list"),
        ({"tools": [5]}, "tools[0]", "must be an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is not supported"),
        ({"tools": [ADD, ADD]}, "tools", 'there are two "add"'),
        ({"tools": tool(name="")}, f"{WHERE}.name", "must be 1 to 64 letters"),
        ({"tools": tool(name="a b")}, f"{WHERE}.name", "must be 1 to 64 letters"),
        ({"tools": tool(name="a" * 65)}, f"{WHERE}.name", "must be 1 to 64 letters"),
        ({"tools": tool(name=5)}, f"{WHERE}.name", "must be a string"),
        ({"tools": tool(parameters=[])}, f"{WHERE}.parameters", "must be an object"),
        ({"tools": tool(colour=1)}, f"{WHERE}.colour", "is not a field here"),
        ({"tools": tool(strict=1)}, f"{WHERE}.strict", "must be true or false"),
        ({"tools": [NOW], "tool_choice": some(ADD)}, "tool_choice", 'is no tool "add"'),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", 'is no tool "add"'),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", 'not "any"'),
        ({"tools": [ADD], "tool_choice": 5}, "tool_choice", "not 5"),
        ({"tools": [ADD], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or"),
        ({"functions": [{"name": "f"}]}, "functions", "is not supported"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(ChatBody, json.dumps({"messages": HI, **fields}).encode())
    assert error.param == param
    assert words in str(error)


def test_what_a_named_tool_may_be() -> None:
    for choice, param in (
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        (some(), "tool_choice.allowed_tools.tools"),
        (some(ADD, mode="none"), "tool_choice.allowed_tools.mode"),
    ):
        body = {"messages": HI, "tools": [ADD], "tool_choice": choice}
        assert refused(ChatBody, json.dumps(body).encode()).param == param


def test_tools_as_templates_take_them() -> None:
    body = chat(tools=[ADD, NOW], tool_choice="auto", parallel_tool_calls=False)
    assert [offered.to_json() for offered in body.offered] == [ADD, NOW]
    assert chat(tools=[ADD], tool_choice="none").offered == []
    assert chat().offered == []


@pytest.mark.parametrize(
    ("choice", "parallel", "wish"),
    [
        (None, True, CallRequirements()),
        ("auto", False, CallRequirements(parallel=False)),
        ("required", True, CallRequirements(required=True)),
        (
            NAMED,
            True,
            CallRequirements(required=True, only=frozenset(["add"]), parallel=False),
        ),
        (some(ADD), True, CallRequirements(only=frozenset(["add"]))),
        (
            some(ADD, NOW, mode="required"),
            False,
            CallRequirements(
                required=True, only=frozenset(["add", "now"]), parallel=False
            ),
        ),
    ],
)
def test_call_requirements(choice: Any, parallel: bool, wish: CallRequirements) -> None:
    body = chat(tools=[ADD, NOW], tool_choice=choice)
    assert call_requirements(body.tool_choice, parallel=parallel) == wish


def test_tools_as_they_are_offered() -> None:
    first, second = offered_tools(chat(tools=tool(strict=True)).offered)
    assert (first.parameters, first.strict) == (SCHEMA, False)
    assert first.param == "tools[0].function.parameters"
    assert (second.parameters, second.strict, second.field_path) == (None, True, WHERE)
