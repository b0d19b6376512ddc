"""The input of a response: items.

Calls, their outputs and reasoning are items beside messages; chat templates take messages
with calls instead. `turns_of` converts items to these.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from minfer.effects.serving.access import reasoning_cipher
from minfer.effects.serving.access.reasoning_cipher import (
    MAX_ENCRYPTED_CHARS,
    DecryptionError,
)
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.fields import ItemLimit
from minfer.effects.serving.openai.response_tools import (
    ResponseTools,
    custom_arguments,
    flat_name,
)
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.omitted_images import omit_image
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    read_by_type,
    template_content,
    text_or_parts,
)
from minfer.effects.text.message_checks import unsupported

_NEUTRAL_IN_PARTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "logprobs": (ANYTHING,),
    "prompt_cache_breakpoint": (ANYTHING,),
}
_NEUTRAL_IN_ITEMS: Final[Mapping[str, tuple[Any, ...]]] = {
    "id": (ANYTHING,),
    "phase": (ANYTHING,),
    "status": (ANYTHING,),
}
_PARAGRAPH: Final = "\n\n"
TemplateMessage = dict[str, Any]  # a message for chat templates


class ContentPart(TypedObject):
    """A piece of a message's text: of an input, or of an earlier output."""

    kinds = ("input_text", "output_text")
    neutral = _NEUTRAL_IN_PARTS
    text: str


def _role(role: object) -> object:
    """A role, by the name for which models were trained."""
    return "system" if role == "developer" else role


ContentParts = Annotated[str | list[ContentPart], text_or_parts(ContentPart, ItemLimit)]
Role = Annotated[
    Literal["system", "user", "assistant"],
    BeforeValidator(
        _role,
        json_schema_input_type=Literal["system", "developer", "user", "assistant"],
    ),
]


class MessageInput(TypedObject):
    """A message; neutral fields are those that OpenAI's SDK returns with a response."""

    kinds = ("message",)
    neutral = _NEUTRAL_IN_ITEMS
    type: str = "message"
    role: Role
    content: ContentParts

    def to_turn(self) -> TemplateMessage:
        """The message for chat templates."""
        return {"role": self.role, "content": template_content(self.content)}


class CallInput(TypedObject):
    """A call in an earlier response."""

    kinds = ("function_call",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "caller": (ANYTHING,),
        "parsed_arguments": (ANYTHING,),
    }
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: str | None = None
    arguments: str  # as they were written, whether JSON or not

    def to_json(self) -> TemplateMessage:
        """The call for chat templates."""
        name = flat_name(self.name, self.namespace)
        function = {"name": name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CustomCallInput(TypedObject):
    """A call of a custom tool in an earlier response."""

    kinds = ("custom_tool_call",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "caller": (ANYTHING,),
    }
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: str | None = None
    input: str

    def to_json(self) -> TemplateMessage:
        """The call for chat templates, as one of a function."""
        name = flat_name(self.name, self.namespace)
        function = {"name": name, "arguments": custom_arguments(self.input)}
        return {"id": self.call_id, "type": "function", "function": function}


class OutputImage(TypedObject):
    """An image in a tool's output; the model reads that it was left out."""

    kinds = ("input_image",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "detail": (ANYTHING,),
        "file_id": (ANYTHING,),
        "prompt_cache_breakpoint": (ANYTHING,),
    }
    image_url: str | None = None

    @property
    def text(self) -> str:
        """The text in its place."""
        return omit_image("output.input_image")


_OUTPUT_PARTS: Final[Mapping[str, type[ContentPart | OutputImage]]] = {
    **dict.fromkeys(ContentPart.kinds, ContentPart),
    "input_image": OutputImage,
}
OutputPart = Annotated[
    ContentPart | OutputImage,
    BeforeValidator(
        partial(read_by_type, _OUTPUT_PARTS),
        json_schema_input_type=ContentPart | OutputImage,
    ),
]
OutputParts = Annotated[str | list[OutputPart], text_or_parts(OutputPart, ItemLimit)]


class CallOutputInput(TypedObject):
    """The output of a tool for a call."""

    kinds = ("function_call_output", "custom_tool_call_output")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "caller": (ANYTHING,),
    }
    call_id: str
    output: OutputParts

    def to_turn(self) -> TemplateMessage:
        """The message for chat templates."""
        content = template_content(self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": content}


class ReasoningText(TypedObject):
    """A piece of reasoning."""

    kinds = ("reasoning_text",)
    text: str


class ReasoningInput(TypedObject):
    """The model's reasoning before an earlier answer, readable or encrypted."""

    kinds = ("reasoning",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "summary": ([], HINT),  # of reasoning by another server, which is left out
    }
    content: Annotated[list[ReasoningText], ItemLimit] | None = None
    encrypted_content: Annotated[str, Field(max_length=MAX_ENCRYPTED_CHARS)] | None = None

    def text(self, key: bytes, field_path: str) -> str:
        """The reasoning; `field_path` is its place in the body. Raises ApiError."""
        readable = "\n".join(segment.text for segment in self.content or ())
        if not self.encrypted_content:
            return readable
        field = f"{field_path}.encrypted_content"
        if not reasoning_cipher.IS_INSTALLED:
            install_hint = reasoning_cipher.HOW_TO_INSTALL
            raise ApiError(f"{field}: cannot be read here: {install_hint}", field)
        try:
            hidden = reasoning_cipher.decrypt(key, self.encrypted_content)
        except DecryptionError:
            message = "was changed, or encrypted by another server, or before a restart"
            remedy = "leave this item out, or start servers with the same --cache-secret"
            raise ApiError(f"{field}: {message}; {remedy}", field) from None
        if readable and readable != hidden:
            field = f"{field_path}.content"
            raise ApiError(
                f"{field}: differs from encrypted_content; leave one of them out", field
            )
        return hidden


class AdditionalToolsInput(TypedObject):
    """Tools beside those of the request's field."""

    kinds = ("additional_tools",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"id": (ANYTHING,)}
    role: Literal["developer"]
    tools: ResponseTools


class HostedCallInput(TypedObject):
    """A call that a hosted tool has answered elsewhere: it has no results, and is left
    out.
    """

    kinds = ("web_search_call",)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        return {"type": value["type"]} if isinstance(value, dict) else value


InputItem = (
    MessageInput
    | CallInput
    | CustomCallInput
    | CallOutputInput
    | ReasoningInput
    | AdditionalToolsInput
    | HostedCallInput
)
_CLASSES: Final[tuple[type[InputItem], ...]] = (
    MessageInput,
    CallInput,
    CustomCallInput,
    CallOutputInput,
    ReasoningInput,
    AdditionalToolsInput,
    HostedCallInput,
)
_KINDS: Final[Mapping[str, type[InputItem]]] = {
    name: kind for kind in _CLASSES for name in kind.kinds
}


def _read_item(value: object) -> object:
    """An item of the kind that its `type` names."""
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        supported = " or ".join(map(short_json, _KINDS))
        raise invalid_value(unsupported(kind, short_json(kind), supported), "type")
    return _KINDS[kind].model_validate(value)


AnyItem = Annotated[
    InputItem, BeforeValidator(_read_item, json_schema_input_type=InputItem)
]


def check_outputs(items: Sequence[AnyItem]) -> None:
    """Raise the error in outputs, if any: each must belong to an earlier call."""
    call_ids = set[str]()
    for index, item in enumerate(items):
        if isinstance(item, CallInput | CustomCallInput):
            call_ids.add(item.call_id)
        if isinstance(item, CallOutputInput) and item.call_id not in call_ids:
            field_path = f"input[{index}].call_id"
            raise invalid_value("must be that of a call in an earlier item", field_path)


def turns_of(items: Sequence[AnyItem], key: bytes = b"") -> list[TemplateMessage]:
    """Items as messages: successive items of the assistant's answer are one. `key` is
    that of encrypted reasoning. Raises ApiError for what it does not decrypt.
    """
    turns: list[TemplateMessage] = []
    reasoning = ""
    for number, item in enumerate(items):
        match item:
            case ReasoningInput():
                text = item.text(key, f"input[{number}]")
                reasoning = "\n".join(filter(None, (reasoning, text)))
            case AdditionalToolsInput() | HostedCallInput():
                pass
            case CallInput() | CustomCallInput() | MessageInput(role="assistant"):
                _add_assistant_item(turns, item, reasoning)
                reasoning = ""
            case MessageInput() | CallOutputInput():
                turns += _reasoning_turn(reasoning)
                turns.append(item.to_turn())
                reasoning = ""
    return turns + _reasoning_turn(reasoning)


def _reasoning_turn(reasoning: str) -> list[TemplateMessage]:
    """The turn of an answer that ended within its reasoning."""
    turn = {"role": "assistant", "content": None, "reasoning_content": reasoning}
    return [turn] if reasoning else []


def _add_assistant_item(
    turns: list[TemplateMessage],
    item: MessageInput | CallInput | CustomCallInput,
    reasoning: str,
) -> None:
    """Add an assistant's item, to its last turn where it belongs to that."""
    last: TemplateMessage = turns[-1] if turns else {"role": ""}
    # Text after calls belongs to the same answer: their outputs come later.
    called = isinstance(item, CallInput | CustomCallInput)
    continues_answer = called or "tool_calls" in last
    if last["role"] != "assistant" or reasoning or not continues_answer:
        last = {"role": "assistant", "content": None}
        turns.append(last)
    if reasoning:
        last["reasoning_content"] = reasoning
    if isinstance(item, CallInput | CustomCallInput):
        last.setdefault("tool_calls", []).append(item.to_json())
    elif last["content"] is None:
        last["content"] = template_content(item.content)
    else:
        contents = (last["content"], template_content(item.content))
        last["content"] = _PARAGRAPH.join(map(_text, contents))


def _text(content: str | list[dict[str, str]]) -> str:
    texts = (
        [content]
        if isinstance(content, str)
        else [segment["text"] for segment in content]
    )
    return "".join(texts)
