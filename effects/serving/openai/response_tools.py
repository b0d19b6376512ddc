"""The tools of a response: functions, custom tools, namespaces of these, hosted tools.

The model sees functions only. A tool in a namespace is a function whose name begins with
the namespace's; a custom tool, whose input is text, is a function with the one argument
`input`. Calls of these become what the client offered again: `CallTarget`. Hosted tools
run on OpenAI's servers; here they are left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from attrs import field, frozen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from minfer.effects.serving.openai.fields import ItemLimit
from minfer.effects.serving.openai.tools import (
    AllowedToolList,
    AllowedTools,
    ChoiceWord,
    FunctionName,
    Mode,
    NamedTool,
    ToolChoice,
    ToolName,
    read_choice,
)
from minfer.effects.serving.protocol import CallTarget
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.tool_constraints import OfferedTool
from minfer.effects.serving.request_parsing.typed_hints import hint
from minfer.effects.serving.request_parsing.typed_objects import TypedObject
from minfer.effects.text.grammars.escaped_patterns import BracketError, check_brackets
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_terminals import TextGrammar
from minfer.effects.text.tools.text_arguments import TextArgument

INPUT_ARGUMENT: Final = "input"  # of a function that stands for a custom tool
_SEPARATOR: Final = "__"  # between a namespace and a name
# Tools that OpenAI's servers run, or whose calls have a form of their own.
HOSTED_TOOLS: Final = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_callers": (ANYTHING,),
    "async": (False,),
    "output_schema": (ANYTHING,),
}


class FunctionTool(TypedObject):
    """A function that the model may call."""

    kinds = ("function",)
    neutral = _NEUTRAL
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    defer_loading: Annotated[bool, hint("tools.defer_loading", False)] = False

    def to_json(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        return self.model_dump()


class InputFormat(TypedObject):
    """The format of a custom tool's input: any text, or one of a grammar."""

    kinds = ("text", "grammar")
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("syntax", "definition"):
            value = getattr(self, name)
            if self.type == "grammar" and value is None:
                raise invalid_value("is missing", name)
            if self.type == "text" and value is not None:
                raise invalid_value("is for a grammar; leave it out", name)
        if self.syntax == "regex":
            self._check_brackets(self.definition or "")
        return self

    @staticmethod
    def _check_brackets(pattern: str) -> None:
        try:
            check_brackets(pattern)
        except BracketError as error:
            raise invalid_value(str(error), "definition") from None
        except GrammarError:
            pass  # what cannot be enforced is refused where a call is required


class CustomTool(TypedObject):
    """A tool whose input is text."""

    kinds = ("custom",)
    neutral = _NEUTRAL
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None
    defer_loading: Annotated[bool, hint("tools.defer_loading", False)] = False

    def to_json(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        return self.model_dump(exclude_none=True)

    @property
    def grammar(self) -> TextGrammar | None:
        """What its input must be; None: any text."""
        if self.format is None or self.format.syntax is None:
            return None
        return TextGrammar(self.format.syntax, self.format.definition or "")

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its one argument."""
        text: dict[str, Any] = {"type": "string"}
        if self.format is not None and self.format.type == "grammar":
            grammar = f"{self.format.syntax} grammar:\n{self.format.definition}"
            text["description"] = f"A text of this {grammar}"
        if self.format is not None and self.format.syntax == "regex":
            text["pattern"] = f"^(?:{self.format.definition})$"
        return {
            "type": "object",
            "properties": {INPUT_ARGUMENT: text},
            "required": [INPUT_ARGUMENT],
            "additionalProperties": False,
        }


class HostedTool(StrictObject):
    """A tool that is left out, whatever its fields are."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        return {"type": value["type"]}

    def to_json(self) -> dict[str, Any]:
        """The tool's type alone."""
        return self.model_dump()


def _read_tool(value: object, kinds: Mapping[str, type[StrictObject]]) -> object:
    """A tool of the kind that its `type` names."""
    if not isinstance(value, dict):
        raise invalid_value("must be an object")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        supported = " or ".join(
            short_json(name) for name in kinds if name not in HOSTED_TOOLS
        )
        raise invalid_value(
            f"{short_json(kind)} is not supported; there is {supported}", "type"
        )
    return kinds[kind].model_validate(value)


_MEMBER_TOOLS: Final = {"function": FunctionTool, "custom": CustomTool}
MemberTool = Annotated[
    FunctionTool | CustomTool,
    BeforeValidator(
        partial(_read_tool, kinds=_MEMBER_TOOLS),
        json_schema_input_type=FunctionTool | CustomTool,
    ),
]


class NamespaceTool(TypedObject):
    """Functions and custom tools under a shared name."""

    kinds = ("namespace",)
    name: ToolName
    description: str | None = None
    tools: Annotated[list[MemberTool], ItemLimit]

    def to_json(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        tools = [tool.to_json() for tool in self.tools]
        return {**self.model_dump(exclude={"tools"}), "tools": tools}


ResponseTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | HostedTool,
    BeforeValidator(
        partial(
            _read_tool,
            kinds={
                **_MEMBER_TOOLS,
                "namespace": NamespaceTool,
                **dict.fromkeys(HOSTED_TOOLS, HostedTool),
            },
        ),
        json_schema_input_type=FunctionTool | CustomTool | NamespaceTool | HostedTool,
    ),
]
ResponseTools = Annotated[list[ResponseTool], ItemLimit]


def flat_name(name: str, namespace: str | None) -> str:
    """The name under which the model sees a tool."""
    if not namespace:
        return name
    separator = "" if namespace.endswith(_SEPARATOR) else _SEPARATOR
    return f"{namespace}{separator}{name}"


@frozen(kw_only=True)
class FlatTool:
    """A tool as a function for the model."""

    tool: FunctionTool | CustomTool
    field_path: str  # its place in the body
    namespace: NamespaceTool | None = None
    first: bool = False  # of its namespace
    name: str = field(init=False)

    @name.default
    def _flat(self) -> str:
        namespace = None if self.namespace is None else self.namespace.name
        return flat_name(self.tool.name, namespace)

    @property
    def target(self) -> CallTarget:
        """What calls of it become."""
        custom = isinstance(self.tool, CustomTool)
        namespace = self.namespace.name if self.namespace else ""
        return CallTarget(name=self.tool.name, namespace=namespace, custom=custom)

    def to_json(self) -> dict[str, Any]:
        """The function for chat templates. The first one has its namespace's description,
        too.
        """
        descriptions = [self.tool.description]
        if self.first and self.namespace is not None:
            descriptions.insert(0, self.namespace.description)
        function_fields = {
            "description": "\n\n".join(filter(None, descriptions)) or None,
            "parameters": self.tool.parameters,
        }
        function_fields = {
            name: value for name, value in function_fields.items() if value is not None
        }
        return {"type": "function", "function": {"name": self.name, **function_fields}}

    def offered(self) -> OfferedTool:
        """The function in the form in which it is enforced."""
        custom = isinstance(self.tool, CustomTool)
        grammar = self.tool.grammar if isinstance(self.tool, CustomTool) else None
        return OfferedTool(
            name=self.name,
            parameters=self.tool.parameters,
            field_path=self.field_path,
            schema="format" if custom else "parameters",
            strict=isinstance(self.tool, FunctionTool) and self.tool.strict,
            text=None if grammar is None else TextArgument(INPUT_ARGUMENT, grammar),
        )


def flatten(tools: Sequence[ResponseTool], field_path: str) -> Iterator[FlatTool]:
    """The tools that the model sees, of the list at `field_path`."""
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for number, member in enumerate(tool.tools):
                yield FlatTool(
                    tool=member,
                    field_path=f"{field_path}[{index}].tools[{number}]",
                    namespace=tool,
                    first=number == 0,
                )
        elif not isinstance(tool, HostedTool):
            yield FlatTool(tool=tool, field_path=f"{field_path}[{index}]")


def hosted_tools(tools: Sequence[ResponseTool], field_path: str) -> dict[str, str]:
    """The types of the tools that are left out, by their place in the body."""
    return {
        f"{field_path}[{index}]": tool.type
        for index, tool in enumerate(tools)
        if isinstance(tool, HostedTool)
    }


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool with this input."""
    return json.dumps({INPUT_ARGUMENT: text}, ensure_ascii=False)


# --- the tool choice --------------------------------------------------------------------


class NamedFunction(TypedObject):
    """The tool that must be called."""

    kinds = ("function", "custom")
    name: str
    namespace: str | None = None

    def to_chat(self, tools: Sequence[FlatTool]) -> NamedTool:
        """The tool choice in the form of a chat: a name without a namespace may be that
        of a tool in one.
        """
        name = flat_name(self.name, self.namespace)
        if self.namespace is None and name not in {tool.name for tool in tools}:
            same_name = [tool.name for tool in tools if tool.tool.name == name]
            name = same_name[0] if len(same_name) == 1 else name
        return NamedTool(type="function", function=FunctionName(name=name))


def _read_allowed(value: object) -> NamedFunction | HostedTool:
    hosted = isinstance(value, dict) and value.get("type") in HOSTED_TOOLS
    return (HostedTool if hosted else NamedFunction).model_validate(value)


AllowedTool = Annotated[
    NamedFunction | HostedTool,
    BeforeValidator(_read_allowed, json_schema_input_type=NamedFunction | HostedTool),
]


def _without_hosted(tools: list[AllowedTool]) -> list[AllowedTool]:
    return [tool for tool in tools if isinstance(tool, NamedFunction)]


class AllowedFunctions(TypedObject):
    """Only these tools may be called, whichever are in the prompt."""

    kinds: ClassVar[tuple[str, ...]] = ("allowed_tools",)
    mode: Mode
    tools: Annotated[
        list[AllowedTool],
        ItemLimit,
        AfterValidator(_without_hosted),
        Field(min_length=1),
    ]

    def to_chat(self, tools: Sequence[FlatTool]) -> AllowedTools:
        """The tool choice in the form of a chat."""
        named = [
            tool.to_chat(tools) for tool in self.tools if isinstance(tool, NamedFunction)
        ]
        return AllowedTools(
            type="allowed_tools",
            allowed_tools=AllowedToolList(mode=self.mode, tools=named),
        )


FunctionChoice = Annotated[
    ChoiceWord | NamedFunction | AllowedFunctions,
    BeforeValidator(
        partial(read_choice, named_class=NamedFunction, allowed_class=AllowedFunctions),
        json_schema_input_type=ChoiceWord | NamedFunction | AllowedFunctions,
    ),
]


def chat_choice(
    choice: ChoiceWord | NamedFunction | AllowedFunctions | None,
    tools: Sequence[FlatTool],
) -> ToolChoice | None:
    """The tool choice in the form of a chat."""
    return choice if isinstance(choice, str | None) else choice.to_chat(tools)
