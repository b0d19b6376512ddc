"""Tools in Anthropic's API: which are in the prompt, and which the model may call.

A tool with `defer_loading` is not in the prompt until a `tool_reference` in a tool's
result names it: its description is in that result then, so that the beginning of the
prompt, and with it the prefix cache, stays as it was. Tools that search for such tools at
the server are accepted, but nothing is searched: deferred tools are all in the prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.tool_constraints import (
    TOOL_CHOICE,
    CallRequirements,
    OfferedTool,
    check_names,
)
from minfer.effects.serving.request_parsing.typed_objects import TypedObject

AnthropicToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
_SEARCH_TOOLS: Final = ("tool_search_tool_regex", "tool_search_tool_bm25")


class AnthropicTool(StrictObject):
    """A tool that the model may call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"], HINT),
        "cache_control": (HINT,),
        "eager_input_streaming": (ANYTHING,),
        "input_examples": ([], HINT),
        "type": ("custom",),
    }
    name: AnthropicToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False

    def to_json(self) -> dict[str, Any]:
        """The tool for chat templates."""
        description = (
            {} if self.description is None else {"description": self.description}
        )
        function = {"name": self.name, **description, "parameters": self.input_schema}
        return {"type": "function", "function": function}

    @property
    def text(self) -> str:
        """The tool as a result of a search shows it."""
        function = json.dumps(self.to_json()["function"], ensure_ascii=False)
        return f"<function>{function}</function>"


class ToolSearch(TypedObject):
    """Anthropic's server-side search for deferred tools, which is not run."""

    kinds = tuple(f"{name}{date}" for name in _SEARCH_TOOLS for date in ("_20251119", ""))
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (ANYTHING,),
        "cache_control": (ANYTHING,),
        "defer_loading": (ANYTHING,),
        "strict": (ANYTHING,),
    }
    name: AnthropicToolName


def _read_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ToolSearch.kinds:
        return ToolSearch.model_validate(value)
    return AnthropicTool.model_validate(value)


Tool = Annotated[
    AnthropicTool | ToolSearch,
    BeforeValidator(_read_tool, json_schema_input_type=AnthropicTool | ToolSearch),
]


class AnthropicToolChoice(TypedObject):
    """Whether tools may or must be called: any of them, or the one named."""

    kinds = ("auto", "none", "any", "tool")
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name is None and self.type == "tool":
            raise invalid_value("is missing: which tool is it?", "name")
        if self.name is not None and self.type != "tool":
            raise invalid_value(
                f"is not of {short_json(self.type)}; leave it out", "name"
            )
        return self

    def requirements(self) -> CallRequirements:
        """Which calls are required."""
        return CallRequirements(
            required=self.type in ("any", "tool"),
            only=None if self.name is None else frozenset([self.name]),
            parallel=not (self.disable_parallel_tool_use or self.type == "tool"),
        )


def check_choice(
    tools: Sequence[AnthropicTool | ToolSearch], choice: AnthropicToolChoice | None
) -> None:
    """Raise the error in tools or in the tool choice, if any."""
    check_names([tool.name for tool in tools])
    if choice is None or not choice.requirements().required:
        return
    names = [tool.name for tool in tools if isinstance(tool, AnthropicTool)]
    if not names:
        raise invalid_value("needs tools", TOOL_CHOICE)
    if choice.name is not None and choice.name not in names:
        message = f"there is no tool {short_json(choice.name)}"
        raise invalid_value(f"{message}; name one of tools", f"{TOOL_CHOICE}.name")


def prompt_tools(tools: Sequence[AnthropicTool | ToolSearch]) -> list[AnthropicTool]:
    """The tools at the beginning of the prompt."""
    searches = {tool.name for tool in tools if isinstance(tool, ToolSearch)}
    for name in _SEARCH_TOOLS:
        if name in searches:
            note_ignored(f"tools.{name}")
    return [
        tool
        for tool in tools
        if isinstance(tool, AnthropicTool) and (searches or not tool.defer_loading)
    ]


def callable_tools(
    tools: Sequence[AnthropicTool | ToolSearch],
    changes: Mapping[str, bool],
    choice: AnthropicToolChoice | None,
) -> list[OfferedTool]:
    """The tools that the model may call, in the form in which they are enforced: those in
    the prompt, and that of the tool choice; after `changes` by messages, which offer
    a tool or no longer do.
    """
    named = {tool.name for tool in prompt_tools(tools)}
    if choice is not None and choice.name is not None:
        named.add(choice.name)
    named |= {name for name, offered in changes.items() if offered}
    named -= {name for name, offered in changes.items() if not offered}
    return [
        OfferedTool(
            name=tool.name,
            parameters=tool.input_schema,
            field_path=f"tools[{index}]",
            schema="input_schema",
            strict=tool.strict,
        )
        for index, tool in enumerate(tools)
        if isinstance(tool, AnthropicTool) and tool.name in named
    ]
