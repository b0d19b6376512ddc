"""The blocks of messages in Anthropic's API: text, reasoning, calls and their results.

A tool is described, called and answered in blocks of their own kinds; chat templates take
messages with calls, and messages of tools instead. `turns_of` converts blocks to these.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from minfer.effects.serving.anthropic.documents import DocumentBlock, ItemLimit, TextBlock
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.omitted_images import omit_image
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    template_content,
    text_or_parts,
)
from minfer.effects.text.message_checks import unsupported

TemplateMessage = dict[str, Any]  # a message for chat templates


class ThinkingBlock(TypedObject):
    """The model's reasoning before an earlier answer."""

    kinds = ("thinking",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"signature": (ANYTHING,)}
    thinking: str


class RedactedThinkingBlock(TypedObject):
    """Encrypted reasoning of another server, which cannot be shown to the model."""

    kinds = ("redacted_thinking",)
    data: str


def _check_input(value: object) -> object:
    if not isinstance(value, dict | str):
        raise invalid_value("must be an object")
    return value


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
        PlainValidator(_check_input, json_schema_input_type=dict[str, Any] | str),
    ] = ""

    def to_json(self) -> TemplateMessage:
        """The call for chat templates."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class SearchUseBlock(TypedObject):
    """A search for tools that another server has made."""

    kinds = ("server_tool_use",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "caller": (ANYTHING,),
    }
    id: str
    name: Literal["tool_search_tool_regex", "tool_search_tool_bm25"]
    input: dict[str, Any]


class SearchResultBlock(TypedObject):
    """The tools that it has found; they are in the prompt anyway."""

    kinds = ("tool_search_tool_result",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"cache_control": (HINT,)}
    tool_use_id: str
    content: dict[str, Any]


class ToolReferenceBlock(TypedObject):
    """A deferred tool that a search has found; `conversation` replaces it by its text."""

    kinds = ("tool_reference",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"cache_control": (HINT,)}
    tool_name: str


class ChangedTool(StrictObject):
    """The tool that a change is about."""

    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(TypedObject):
    """A tool that is offered, or no longer, from here on."""

    kinds = ("tool_addition", "tool_removal")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"cache_control": (HINT,)}
    tool: ChangedTool


class ResultImageBlock(TypedObject):
    """An image in a tool's result; the model reads that it was left out."""

    kinds = ("image",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"cache_control": (HINT,)}
    source: dict[str, Any]

    @property
    def text(self) -> str:
        """The text in its place."""
        return omit_image("tool_result.image")


ResultPart = TextBlock | DocumentBlock | ResultImageBlock | ToolReferenceBlock


def _read_by_kind(value: object, kinds: Mapping[str, Any]) -> object:
    """A block of the kind that its `type` names."""
    kind = value.get("type", "text") if isinstance(value, dict) else "text"
    if not isinstance(kind, str) or kind not in kinds:
        supported = " or ".join(map(short_json, kinds))
        raise invalid_value(unsupported(kind, short_json(kind), supported), "type")
    return kinds[kind].model_validate(value)


_RESULT_KINDS: Final[Mapping[str, type[ResultPart]]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "image": ResultImageBlock,
    "tool_reference": ToolReferenceBlock,
}
AnyResultPart = Annotated[
    ResultPart,
    BeforeValidator(
        lambda value: _read_by_kind(value, _RESULT_KINDS),
        json_schema_input_type=ResultPart,
    ),
]
ResultContent = Annotated[
    str | list[AnyResultPart], text_or_parts(AnyResultPart, ItemLimit)
]


class ToolResultBlock(TypedObject):
    """A tool's result of a call; a failure is described in its text."""

    kinds = ("tool_result",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "is_error": (ANYTHING,),
    }
    tool_use_id: str
    content: ResultContent | None = None

    def to_turn(self) -> TemplateMessage:
        """The message for chat templates; tool references are texts by now."""
        content = self.content or ""
        turn_content = content if isinstance(content, str) else _text_parts(content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": turn_content}


ContentBlock = (
    TextBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SearchUseBlock
    | SearchResultBlock
    | ToolChangeBlock
)
_KINDS: Final[Mapping[str, type[ContentBlock]]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "server_tool_use": SearchUseBlock,
    "tool_search_tool_result": SearchResultBlock,
    "tool_addition": ToolChangeBlock,
    "tool_removal": ToolChangeBlock,
}
# The kinds of blocks that turns of a role may have.
_KINDS_BY_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("text", "tool_addition", "tool_removal"),
    "user": ("text", "document", "tool_result"),
    "assistant": (
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "server_tool_use",
        "tool_search_tool_result",
    ),
}
AnyBlock = Annotated[
    ContentBlock,
    BeforeValidator(
        lambda value: _read_by_kind(value, _KINDS), json_schema_input_type=ContentBlock
    ),
]
MessageContent = Annotated[str | list[AnyBlock], text_or_parts(AnyBlock, ItemLimit)]


def blocks_of(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    """Content as blocks: a text is one."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def check_role(role: str, blocks: str | Sequence[ContentBlock]) -> None:
    """Raise an error about the first block that cannot be in a turn of this role."""
    for index, block in enumerate(() if isinstance(blocks, str) else blocks):
        if block.type not in _KINDS_BY_ROLE[role]:
            message = f"{short_json(block.type)} cannot be in a message of the {role}"
            raise invalid_value(message, f"content[{index}].type")


def turns_of(
    role: str, contents: Sequence[str | Sequence[ContentBlock]]
) -> list[TemplateMessage]:
    """The contents of turns of one role as messages: tool results come before the user's
    other texts.
    """
    if len(contents) == 1 and isinstance(contents[0], str):
        return [{"role": role, "content": contents[0]}]
    blocks = [block for content in contents for block in blocks_of(content)]
    results = [block.to_turn() for block in blocks if isinstance(block, ToolResultBlock)]
    calls = [block.to_json() for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    texts = [block for block in blocks if isinstance(block, TextBlock | DocumentBlock)]
    content = _text_parts(texts) if texts else _empty_content(role)
    turn: TemplateMessage = {"role": role, "content": content}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or not results else results


def _text_parts(blocks: Sequence[ResultPart]) -> str | list[dict[str, str]]:
    """Parts for chat templates. One part is a text: Claude Code sends the same text as a
    list in one turn and as a text in the next, and the prefix must not change.
    """
    texts = [block for block in blocks if not isinstance(block, ToolReferenceBlock)]
    return texts[0].text if len(texts) == 1 else template_content(texts)


def _empty_content(role: str) -> str | None:
    """The content of a turn without text."""
    return None if role == "assistant" else ""
