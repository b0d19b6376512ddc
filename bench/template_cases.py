"""Conversations in which chat templates are rendered."""

import json
from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

Messages = list[dict[str, Any]]
SYSTEM: Final = {"role": "system", "content": "Answer briefly."}
USER: Final = {"role": "user", "content": "How warm is it in Zürich & 東京?"}
ANSWER: Final = {"role": "assistant", "content": 'It is "warm".\n'}
NEXT: Final = {"role": "user", "content": "And tomorrow?"}
ARGUMENTS: Final = {"city": "Zürich", "days": [1, 2.5], "unit": None, "exact": True}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name, as 東京."},
                "days": {"type": "array", "items": {"type": "number"}},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "exact": {"type": "boolean", "default": False},
            },
            "required": ["city"],
        },
    },
}
NOW: Final = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS: Final = [WEATHER, NOW]
NULLABLE: Final = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "What there is.",
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"type": ["string", "null"], "enum": ["a", None]},
                "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}


def call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in an assistant's message."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    """A tool's message."""
    key = f"call0000{number}"
    return {"role": "tool", "tool_call_id": key, "name": name, "content": content}


CALLED: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(1, "get_weather", ARGUMENTS)],
}
BOTH: Final = {
    **CALLED,
    "tool_calls": [call(1, "get_weather", {"city": "a"}), call(2, "now", {})],
}
RESULT: Final = result(1, "get_weather", '{"degrees": 21.5, "sky": "blue"}')
RESULTS: Final = [RESULT, result(2, "now", "noon")]
THOUGHT: Final = {"reasoning_content": "I need the weather."}
PARTS: Final = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}


@frozen(kw_only=True)
class Case:
    """A conversation and the options of its rendering."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(factory=dict)
    prompt: bool = True  # whether the answer is begun
    continues: bool = False
    # What minfer does otherwise on purpose, if the texts differ.
    reason: str = ""


PLACED: Final = "every system message is shown (effects/text/system_messages.py)"
NO_NULL: Final = "content that is null is left out, or empty, as the template takes it"
CASES: Final[Mapping[str, Case]] = {
    "plain": Case(messages=[USER]),
    "plain, not begun": Case(messages=[USER], prompt=False),
    "system": Case(messages=[SYSTEM, USER]),
    "several turns": Case(messages=[SYSTEM, USER, ANSWER, NEXT]),
    "continued": Case(
        messages=[USER, {"role": "assistant", "content": "It is"}],
        prompt=False,
        continues=True,
    ),
    "content in parts": Case(
        messages=[PARTS],
        reason="texts are lines where the template reads no list of them",
    ),
    "thinking on": Case(
        messages=[SYSTEM, USER], kwargs={"enable_thinking": True, "thinking": True}
    ),
    "thinking off": Case(
        messages=[SYSTEM, USER], kwargs={"enable_thinking": False, "thinking": False}
    ),
    "effort": Case(messages=[USER], kwargs={"reasoning_effort": "high"}),
    "reasoning of an earlier turn": Case(
        messages=[USER, {**ANSWER, **THOUGHT}, NEXT],
    ),
    "tools": Case(messages=[USER], tools=TOOLS),
    "tools with nulls": Case(messages=[USER], tools=[NULLABLE]),
    "system and tools": Case(messages=[SYSTEM, USER], tools=TOOLS),
    "call": Case(messages=[SYSTEM, USER, CALLED, RESULT], tools=TOOLS),
    "call without text": Case(
        messages=[USER, {**CALLED, "content": None}, RESULT],
        tools=TOOLS,
        reason=NO_NULL,
    ),
    "call with text": Case(
        messages=[USER, {**CALLED, "content": "I look."}, RESULT], tools=TOOLS
    ),
    "call with reasoning": Case(
        messages=[USER, {**CALLED, **THOUGHT}, RESULT], tools=TOOLS
    ),
    "call without arguments": Case(
        messages=[
            USER,
            {**CALLED, "tool_calls": [call(1, "now", {})]},
            result(1, "now", "noon"),
        ],
        tools=TOOLS,
    ),
    "two calls": Case(messages=[USER, BOTH, *RESULTS], tools=TOOLS),
    "call, answer and question": Case(
        messages=[SYSTEM, USER, CALLED, RESULT, ANSWER, NEXT], tools=TOOLS
    ),
    "calls without tools": Case(messages=[USER, CALLED, RESULT, ANSWER, NEXT]),
    "two system messages": Case(messages=[SYSTEM, SYSTEM, USER]),
    "late system message": Case(messages=[SYSTEM, USER, ANSWER, SYSTEM, NEXT]),
    "call with nulls": Case(
        messages=[USER, {**CALLED, "content": None}, RESULT],
        tools=[*TOOLS, NULLABLE],
        reason=NO_NULL,
    ),
}


def with_text_arguments(messages: Messages) -> Messages:
    """Messages whose arguments of calls are text, as in OpenAI's API."""
    return [
        {**message, "tool_calls": [*map(_as_text, message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_text(tool_call: Mapping[str, Any]) -> dict[str, Any]:
    function = tool_call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**tool_call, "function": {**function, "arguments": text}}
