"""The blocks of messages in Anthropic's API: text, reasoning, calls and their results.

A tool is described, called and answered in blocks of their own kinds; chat templates take
messages with calls, and messages of tools instead. `turns_of` converts blocks to these.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    StrictObject,
    shown,
    wrong,
)
from minfer.effects.serving.request_parsing.tool_constraints import (
    CHOICE,
    CallRequirements,
    OfferedTool,
    check_names,
)
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    template_content,
    text_or_parts,
)

MAX_ITEMS: Final = 4096  # messages; blocks of one
_NEUTRAL_IN_BLOCKS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_control": (HINT,),
    "citations": ([],),
}
Few = Field(fail_fast=True, max_length=MAX_ITEMS)
Turn = dict[str, Any]  # a message for chat templates


class TextBlock(TypedObject):
    """A piece of text."""

    kinds = ("text",)
    neutral = _NEUTRAL_IN_BLOCKS
    text: str


Texts = Annotated[str | list[TextBlock], text_or_parts(TextBlock, Few)]


class ThinkingBlock(TypedObject):
    """The model's reasoning before an earlier answer."""

    kinds = ("thinking",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"signature": (ANYTHING,)}
    thinking: str


def _input(given: object) -> object:
    if not isinstance(given, dict | str):
        raise wrong("must be an object")
    return given


class ToolUseBlock(TypedObject):
    """A call in an earlier answer."""

    kinds = ("tool_use",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "caller": (ANYTHING,),
    }
    id: Annotated[str, Field(min_length=1)]
    name: str
    # Arguments that cannot be parsed are text.
    input: Annotated[
        dict[str, Any] | str,
        PlainValidator(_input, json_schema_input_type=dict[str, Any] | str),
    ] = ""

    def to_json(self) -> Turn:
        """The call for chat templates."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(TypedObject):
    """A tool's result of a call; a failure is described in its text."""

    kinds = ("tool_result",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "is_error": (ANYTHING,),
    }
    tool_use_id: str
    content: Texts | None = None

    def to_turn(self) -> Turn:
        """The message for chat templates."""
        content = template_content(self.content or "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_KINDS: Final[Mapping[str, type[Block]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
# The kinds of blocks that turns of a role may have.
_KINDS_BY_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}


def _block(given: object) -> object:
    """A block of the kind that its `type` names."""
    kind = given.get("type", "text") if isinstance(given, dict) else "text"
    if not isinstance(kind, str) or kind not in _KINDS:
        there = " or ".join(map(shown, _KINDS))
        raise wrong(f"{shown(kind)} is not supported; there is {there}", "type")
    return _KINDS[kind].model_validate(given)


AnyBlock = Annotated[Block, BeforeValidator(_block, json_schema_input_type=Block)]
Blocks = Annotated[str | list[AnyBlock], text_or_parts(AnyBlock, Few)]


def check_role(role: str, blocks: str | Sequence[Block]) -> None:
    """Raise an error about the first block that cannot be in a turn of this role."""
    for at, block in enumerate(() if isinstance(blocks, str) else blocks):
        if block.type not in _KINDS_BY_ROLE[role]:
            message = f"{shown(block.type)} cannot be in a message of the {role}"
            raise wrong(message, f"content[{at}].type")


def turns_of(role: str, contents: Sequence[str | Sequence[Block]]) -> list[Turn]:
    """The contents of turns of one role as messages: tool results come before the user's
    other texts.
    """
    if len(contents) == 1 and isinstance(contents[0], str):
        return [{"role": role, "content": contents[0]}]
    blocks = [block for content in contents for block in _blocks(content)]
    results = [one.to_turn() for one in blocks if isinstance(one, ToolResultBlock)]
    calls = [one.to_json() for one in blocks if isinstance(one, ToolUseBlock)]
    thoughts = [one.thinking for one in blocks if isinstance(one, ThinkingBlock)]
    texts = [one for one in blocks if isinstance(one, TextBlock)]
    turn: Turn = {
        "role": role,
        "content": template_content(texts) or _empty_content(role),
    }
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or not results else results


def _empty_content(role: str) -> str | None:
    """The content of a turn without text."""
    return None if role == "assistant" else ""


def _blocks(content: str | Sequence[Block]) -> Sequence[Block]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


class AnthropicTool(StrictObject):
    """A tool that the model may call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "defer_loading": (False,),
        "eager_input_streaming": (ANYTHING,),
        "input_examples": (ANYTHING,),
        "type": ("custom",),
    }
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    def to_json(self) -> Turn:
        """The tool for chat templates."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(TypedObject):
    """Whether tools may or must be called: any of them, or the one named."""

    kinds = ("auto", "none", "any", "tool")
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name is None and self.type == "tool":
            raise wrong("is missing: which tool is it?", "name")
        if self.name is not None and self.type != "tool":
            raise wrong(f"is not of {shown(self.type)}; leave it out", "name")
        return self

    def requirements(self) -> CallRequirements:
        """Which calls are required."""
        return CallRequirements(
            must=self.type in ("any", "tool"),
            only=None if self.name is None else frozenset([self.name]),
            several=not (self.disable_parallel_tool_use or self.type == "tool"),
        )


def check_choice(
    tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None
) -> None:
    """Raise the error in tools or in the tool choice, if any."""
    names = [tool.name for tool in tools]
    check_names(names)
    if choice is None or not choice.requirements().must:
        return
    if not tools:
        raise wrong("needs tools", CHOICE)
    if choice.name is not None and choice.name not in names:
        there = f"there is no tool {shown(choice.name)}"
        raise wrong(f"{there}; name one of tools", f"{CHOICE}.name")


def offered_tools(tools: Sequence[AnthropicTool]) -> list[OfferedTool]:
    """Tools in the form in which they are enforced."""
    return [
        OfferedTool(
            name=tool.name,
            parameters=tool.input_schema,
            where=f"tools[{at}]",
            schema="input_schema",
            strict=tool.strict,
        )
        for at, tool in enumerate(tools)
    ]
