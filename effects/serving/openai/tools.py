"""Tools of a chat: descriptions, tool choice, and earlier calls."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    StrictObject,
    shown,
    wrong,
)
from minfer.effects.serving.request_parsing.tool_constraints import (
    CHOICE,
    Offer,
    Wish,
    check_names,
)
from minfer.effects.serving.request_parsing.typed_objects import TypedObject

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OF_CALLS: Final[Mapping[str, tuple[Any, ...]]] = {"index": (ANYTHING,)}
_OF_CALLED: Final[Mapping[str, tuple[Any, ...]]] = {"parsed_arguments": (ANYTHING,)}
Choice = Literal["none", "auto", "required"]
Mode = Literal["auto", "required"]


def _named(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise wrong("must be 1 to 64 letters, digits, underscores and dashes")
    return name


ToolName = Annotated[str, AfterValidator(_named)]


class Function(StrictObject):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool = False

    def told(self) -> dict[str, Any]:
        """The function for chat templates."""
        there = {"description": self.description, "parameters": self.parameters}
        given = {name: value for name, value in there.items() if value is not None}
        return {"name": self.name, **given}


class Tool(TypedObject):
    """A tool; only functions are supported."""

    kinds = ("function",)
    function: Function

    def told(self) -> dict[str, Any]:
        """The tool for chat templates."""
        return {"type": "function", "function": self.function.told()}


class Name(StrictObject):
    """The name of a function."""

    name: str


class NamedTool(TypedObject):
    """The tool that must be called."""

    kinds = ("function",)
    function: Name


class Allowed(StrictObject):
    """Some of the tools, and whether one of them must be called."""

    mode: Mode
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(TypedObject):
    """Only these tools may be called, whichever are in the prompt."""

    kinds = ("allowed_tools",)
    allowed_tools: Allowed


def read_choice(
    given: object, *, one: type[TypedObject], some: type[TypedObject]
) -> object:
    """The tool choice: a word, or an object for `one` function or `some`. Raises its
    error, if it has one.
    """
    if isinstance(given, dict):
        kind = some if given.get("type") in some.kinds else one
        return kind.model_validate(given)
    if given in ("none", "auto", "required"):
        return given
    raise wrong(f'must be "none", "auto", "required" or a function, not {shown(given)}')


ToolChoice = Annotated[
    Choice | NamedTool | AllowedTools,
    BeforeValidator(
        partial(read_choice, one=NamedTool, some=AllowedTools),
        json_schema_input_type=Choice | NamedTool | AllowedTools,
    ),
]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise the error in tools or in the tool choice, if any."""
    names = [tool.function.name for tool in tools]
    check_names(names)
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise wrong("needs tools", CHOICE)
    only = wish_of(choice, several=True).only or frozenset()
    for name in sorted(only.difference(names)):
        raise wrong(f"there is no tool {shown(name)}; name one of tools", CHOICE)


def wish_of(choice: ToolChoice | None, *, several: bool) -> Wish:
    """Which calls are wanted; `several`, whether there may be more than one."""
    match choice:
        case NamedTool():
            name = frozenset([choice.function.name])
            return Wish(must=True, only=name, several=False)
        case AllowedTools():
            said = choice.allowed_tools
            only = frozenset(one.function.name for one in said.tools)
            return Wish(must=said.mode == "required", only=only, several=several)
    return Wish(must=choice == "required", several=several)


def offers_of(tools: Sequence[Tool], inside: str = ".function") -> list[Offer]:
    """Tools in the form in which they are enforced. A function is `inside` its tool."""
    return [
        Offer(
            name=tool.function.name,
            parameters=tool.function.parameters,
            where=f"tools[{at}]{inside}",
            strict=tool.function.strict,
        )
        for at, tool in enumerate(tools)
    ]


class Called(StrictObject):
    """A function that was called, and its arguments."""

    neutral = _OF_CALLED
    name: str
    arguments: str  # as they were written, whether JSON or not


class ToolCall(TypedObject):
    """A call in an earlier answer."""

    kinds = ("function",)
    neutral = _OF_CALLS
    type: str = "function"
    id: Annotated[str, Field(min_length=1)]
    function: Called

    def told(self) -> dict[str, Any]:
        """The call for chat templates."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}
