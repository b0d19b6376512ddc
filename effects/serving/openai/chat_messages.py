"""Messages of a chat, and their form for chat templates."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, model_validator

from minfer.effects.serving.openai.fields import ItemLimit
from minfer.effects.serving.openai.tools import ToolCall
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    template_content,
    text_or_parts,
)

# Fields that are not supported, with the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": (ANYTHING,),  # the SDK's own, beside what it was parsed of
    "refusal": ("",),
}


class TextPart(TypedObject):
    """A part of a message's content."""

    kinds = ("text",)
    neutral = {"cache_control": (ANYTHING,)}  # noqa: RUF012  # as of all objects here
    text: str


def _role(role: object) -> object:
    """A role, by the name for which models were trained."""
    if role == "function":  # a tool message from before there were tools
        raise invalid_value(
            f"{short_json(role)} messages are not supported; send tool messages"
        )
    return "system" if role == "developer" else role


class ChatMessage(StrictObject):
    """One message; neutral fields are those that OpenAI's SDK returns with an answer."""

    neutral = _NEUTRAL
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(
            _role,
            json_schema_input_type=Literal[
                "system", "developer", "user", "assistant", "tool"
            ],
        ),
    ]
    # None only of an assistant.
    content: Annotated[
        str | list[TextPart] | None, text_or_parts(TextPart, ItemLimit)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], ItemLimit] | None = None
    tool_call_id: str | None = None  # of the call that a tool message answers
    # The model's reasoning before this message, under either name.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid_value("are of assistant messages; leave them out", "tool_calls")
        # An answer may be reasoning alone, which clients may drop.
        if self.content is None and self.role != "assistant":
            raise invalid_value("is missing", "content")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid_value("is missing: which call is answered?", "tool_call_id")
        return self

    @property
    def text(self) -> str:
        """Its content as one text, or the last part of it."""
        if isinstance(self.content, list):
            return self.content[-1].text if self.content else ""
        return self.content or ""

    @property
    def _reasoning(self) -> str:
        """The reasoning of an assistant."""
        reasoning = self.reasoning_content or self.reasoning or ""
        return reasoning if self.role == "assistant" else ""

    def to_turn(self) -> dict[str, Any]:
        """The message for chat templates, without absent fields: templates test them."""
        calls_or_reasoning = self.tool_calls or self._reasoning
        message_content = (
            self.content if self.content is not None or calls_or_reasoning else ""
        )
        content = None if message_content is None else template_content(message_content)
        turn: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            turn["name"] = self.name
        if self._reasoning:
            turn["reasoning_content"] = self._reasoning
        if self.tool_calls:
            turn["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.role == "tool":
            turn["tool_call_id"] = self.tool_call_id
        return turn


def check_calls(messages: Sequence[ChatMessage]) -> None:
    """Raise the error in tool messages, if any: each must answer an earlier call."""
    call_ids = set[str]()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id not in call_ids:
            field_path = f"messages[{index}].tool_call_id"
            raise invalid_value(
                "must be the id of a call in an earlier message", field_path
            )
        call_ids.update(call.id for call in message.tool_calls or ())


def have_tool_calls(messages: Sequence[ChatMessage]) -> bool:
    """Whether messages have calls, or answers to them."""
    return any(message.tool_calls or message.role == "tool" for message in messages)
