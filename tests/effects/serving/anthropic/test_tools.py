"""Tools as chat templates take them, and as the model may call them."""

from typing import Any

import pytest

from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from minfer.effects.serving.request_parsing.tool_constraints import CallRequirements
from tests.effects.serving.anthropic.helpers import HI, body, refused


def test_tools_as_templates_take_them() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    tool = {"name": "f", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    expected = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert [offered_tool.to_json() for offered_tool in body(tools=[tool]).offered] == [
        expected
    ]
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
            CallRequirements(parallel=False),
        ),
        ({"type": "any"}, CallRequirements(required=True)),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            CallRequirements(required=True, parallel=False),
        ),
        (
            {"type": "tool", "name": "f"},
            CallRequirements(required=True, only=frozenset("f"), parallel=False),
        ),
    ],
)
def test_call_requirements(
    choice: dict[str, Any], requirements: CallRequirements
) -> None:
    tool_choice = body(tools=[TOOL], tool_choice=choice).tool_choice
    assert tool_choice is not None
    assert tool_choice.requirements() == requirements


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
    (offer,) = body(tools=[{**TOOL, "strict": True}]).offers
    assert (offer.name, offer.strict, offer.param) == ("f", True, "tools[0].input_schema")


# --- deferred tools -----------------------------------------------------------------

DEFERRED = {**TOOL, "name": "g", "description": "G.", "defer_loading": True}
FOUND: list[Any] = [
    *HI,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "tool_reference", "tool_name": "g"}],
            }
        ],
    },
]


def test_a_deferred_tool_is_in_the_prompt_once_it_is_found() -> None:
    before = body(tools=[TOOL, DEFERRED])
    assert [tool.name for tool in before.offered] == ["f"]
    assert [tool.name for tool in before.offers] == ["f"]
    after = body(tools=[TOOL, DEFERRED], messages=FOUND)
    assert [tool.name for tool in after.offered] == ["f"]  # the beginning is the same
    assert [tool.name for tool in after.offers] == ["f", "g"]
    choice = {"type": "tool", "name": "g"}
    forced = body(tools=[TOOL, DEFERRED], tool_choice=choice)
    assert [tool.name for tool in forced.offers] == ["f", "g"]


def change(kind: str, name: str) -> dict[str, Any]:
    block = {"type": kind, "tool": {"type": "tool_reference", "name": name}}
    return {"role": "system", "content": [block]}


@pytest.mark.parametrize(
    ("kinds", "offered"),
    [
        (["tool_removal"], False),
        (["tool_addition", "tool_removal"], False),
        (["tool_removal", "tool_addition"], True),
    ],
)
def test_a_removed_tool_cannot_be_called(kinds: list[str], offered: bool) -> None:
    other_tool = {**TOOL, "name": "g"}
    messages = [*HI, *(change(kind, "f") for kind in kinds)]
    request = body(tools=[TOOL, other_tool], messages=messages)
    names = ["f", "g"] if offered else ["g"]
    assert [tool.name for tool in request.offers] == names
    assert [tool.field_path for tool in request.offers][-1] == "tools[1]"
    if not offered:
        only = {"type": "tool", "name": "f"}
        removed = {"tools": [TOOL, other_tool], "messages": messages}
        assert refused(**removed, tool_choice=only).param == "tool_choice.name"
        error = refused(tools=[TOOL], messages=messages, tool_choice={"type": "any"})
        assert error.param == "tool_choice"


def test_a_reference_names_one_of_the_tools() -> None:
    error = refused(tools=[TOOL], messages=FOUND)
    assert error.param == "messages[2].content[0]"
    assert 'there is no tool "g"' in str(error)


@pytest.mark.parametrize("date", ["", "_20251119"])
@pytest.mark.parametrize("name", ["tool_search_tool_regex", "tool_search_tool_bm25"])
def test_a_search_by_the_server_is_not_made(name: str, date: str) -> None:
    search = {"type": f"{name}{date}", "name": name}
    with collect_ignored() as hints:
        offered = body(tools=[search, TOOL, DEFERRED]).offered
    assert [tool.name for tool in offered] == ["f", "g"]
    assert hints.names == (f"tools.{name}",)
