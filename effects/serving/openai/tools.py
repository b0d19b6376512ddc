"""Tools of a chat: descriptions, tool choice, and earlier calls."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.tool_constraints import (
    TOOL_CHOICE,
    CallRequirements,
    OfferedTool,
    check_names,
)
from minfer.effects.serving.request_parsing.typed_objects import TypedObject

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NEUTRAL_IN_CALLS: Final[Mapping[str, tuple[Any, ...]]] = {"index": (ANYTHING,)}
_NEUTRAL_IN_FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "parsed_arguments": (ANYTHING,)
}
ChoiceWord = Literal["none", "auto", "required"]
Mode = Literal["auto", "required"]


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise invalid_value("must be 1 to 64 letters, digits, underscores and dashes")
    return name


ToolName = Annotated[str, AfterValidator(_check_name)]


class Function(StrictObject):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool = False

    def to_json(self) -> dict[str, Any]:
        """The function for chat templates."""
        fields = {"description": self.description, "parameters": self.parameters}
        fields = {name: value for name, value in fields.items() if value is not None}
        return {"name": self.name, **fields}


class ChatTool(TypedObject):
    """A tool; only functions are supported."""

    kinds = ("function",)
    function: Function

    def to_json(self) -> dict[str, Any]:
        """The tool for chat templates."""
        return {"type": "function", "function": self.function.to_json()}


class FunctionName(StrictObject):
    """The name of a function."""

    name: str


class NamedTool(TypedObject):
    """The tool that must be called."""

    kinds = ("function",)
    function: FunctionName


class AllowedToolList(StrictObject):
    """Some of the tools, and whether one of them must be called."""

    mode: Mode
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(TypedObject):
    """Only these tools may be called, whichever are in the prompt."""

    kinds = ("allowed_tools",)
    allowed_tools: AllowedToolList


def read_choice(
    value: object, *, named_class: type[TypedObject], allowed_class: type[TypedObject]
) -> object:
    """The tool choice: a word, or an object for one function (of `named_class`) or for
    some (of `allowed_class`). Raises its error, if it has one.
    """
    if isinstance(value, dict):
        kind = allowed_class if value.get("type") in allowed_class.kinds else named_class
        return kind.model_validate(value)
    if value in ("none", "auto", "required"):
        return value
    raise invalid_value(
        f'must be "none", "auto", "required" or a function, not {short_json(value)}'
    )


ToolChoice = Annotated[
    ChoiceWord | NamedTool | AllowedTools,
    BeforeValidator(
        partial(read_choice, named_class=NamedTool, allowed_class=AllowedTools),
        json_schema_input_type=ChoiceWord | NamedTool | AllowedTools,
    ),
]


def check_tools(names: Sequence[str], choice: ToolChoice | None) -> None:
    """Raise the error in tools with these names or in the tool choice, if any."""
    check_names(names)
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise invalid_value("needs tools", TOOL_CHOICE)
    only = call_requirements(choice, parallel=True).only or frozenset()
    for name in sorted(only.difference(names)):
        raise invalid_value(
            f"there is no tool {short_json(name)}; name one of tools", TOOL_CHOICE
        )


def call_requirements(choice: ToolChoice | None, *, parallel: bool) -> CallRequirements:
    """Which calls are required; `parallel`, whether there may be more than one."""
    match choice:
        case NamedTool():
            name = frozenset([choice.function.name])
            return CallRequirements(required=True, only=name, parallel=False)
        case AllowedTools():
            allowed = choice.allowed_tools
            only = frozenset(tool.function.name for tool in allowed.tools)
            return CallRequirements(
                required=allowed.mode == "required", only=only, parallel=parallel
            )
    return CallRequirements(required=choice == "required", parallel=parallel)


def offered_tools(tools: Sequence[ChatTool]) -> list[OfferedTool]:
    """Tools in the form in which they are enforced."""
    return [
        OfferedTool(
            name=tool.function.name,
            parameters=tool.function.parameters,
            field_path=f"tools[{index}].function",
            strict=tool.function.strict,
        )
        for index, tool in enumerate(tools)
    ]


class CalledFunction(StrictObject):
    """A function that was called, and its arguments."""

    neutral = _NEUTRAL_IN_FUNCTIONS
    name: str
    arguments: str  # as they were written, whether JSON or not


class ToolCall(TypedObject):
    """A call in an earlier answer."""

    kinds = ("function",)
    neutral = _NEUTRAL_IN_CALLS
    type: str = "function"
    id: Annotated[str, Field(min_length=1)]
    function: CalledFunction

    def to_json(self) -> dict[str, Any]:
        """The call for chat templates."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}
