"""The input of a response: items, and functions that the model may call.

Calls, their outputs and reasoning are items beside messages; chat templates take messages
with calls instead. `turns_of` converts items to these.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from minfer.effects.serving.openai.fields import Few
from minfer.effects.serving.openai.tools import (
    AllowedToolList,
    AllowedTools,
    ChatTool,
    ChoiceWord,
    Function,
    FunctionName,
    Mode,
    NamedTool,
    ToolName,
    read_choice,
)
from minfer.effects.serving.request_parsing.bodies import ANYTHING, shown, wrong
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    template_content,
    text_or_parts,
)

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
Turn = dict[str, Any]  # a message for chat templates


class ContentPart(TypedObject):
    """A piece of a message's text: of an input, or of an earlier output."""

    kinds = ("input_text", "output_text")
    neutral = _NEUTRAL_IN_PARTS
    text: str


def _role(role: object) -> object:
    """A role, by the name for which models were trained."""
    return "system" if role == "developer" else role


ContentParts = Annotated[str | list[ContentPart], text_or_parts(ContentPart, Few)]
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

    def to_turn(self) -> Turn:
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
    arguments: str  # as they were written, whether JSON or not

    def to_json(self) -> Turn:
        """The call for chat templates."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallOutputInput(TypedObject):
    """The output of a function for a call."""

    kinds = ("function_call_output",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "caller": (ANYTHING,),
    }
    call_id: str
    output: ContentParts

    def to_turn(self) -> Turn:
        """The message for chat templates."""
        content = template_content(self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": content}


class ReasoningText(TypedObject):
    """A piece of reasoning."""

    kinds = ("reasoning_text",)
    text: str


class ReasoningInput(TypedObject):
    """The model's reasoning before an earlier answer."""

    kinds = ("reasoning",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL_IN_ITEMS,
        "encrypted_content": (),
        "summary": (ANYTHING,),
    }
    content: Annotated[list[ReasoningText], Few] | None = None


_KINDS: Final[
    Mapping[str, type[MessageInput | CallInput | CallOutputInput | ReasoningInput]]
] = {
    "message": MessageInput,
    "function_call": CallInput,
    "function_call_output": CallOutputInput,
    "reasoning": ReasoningInput,
}


def _item(given: object) -> object:
    """An item of the kind that its `type` names."""
    kind = given.get("type", "message") if isinstance(given, dict) else "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        there = " or ".join(map(shown, _KINDS))
        raise wrong(f"{shown(kind)} is not supported; there is {there}", "type")
    return _KINDS[kind].model_validate(given)


AnyItem = Annotated[
    MessageInput | CallInput | CallOutputInput | ReasoningInput,
    BeforeValidator(
        _item,
        json_schema_input_type=MessageInput
        | CallInput
        | CallOutputInput
        | ReasoningInput,
    ),
]


def check_outputs(items: Sequence[AnyItem]) -> None:
    """Raise the error in outputs, if any: each must belong to an earlier call."""
    made = set[str]()
    for at, item in enumerate(items):
        if isinstance(item, CallInput):
            made.add(item.call_id)
        if isinstance(item, CallOutputInput) and item.call_id not in made:
            where = f"input[{at}].call_id"
            raise wrong("must be that of a call in an earlier item", where)


def turns_of(items: Sequence[AnyItem]) -> list[Turn]:
    """Items as messages: successive items of the assistant's answer are one."""
    turns: list[Turn] = []
    reasoning = ""
    for item in items:
        match item:
            case ReasoningInput():
                texts = [part.text for part in item.content or ()]
                reasoning = "\n".join([reasoning, *texts] if reasoning else texts)
            case CallInput() | MessageInput(role="assistant"):
                _add_assistant_item(turns, item, reasoning)
                reasoning = ""
            case _:
                turns += _reasoning_turn(reasoning)
                turns.append(item.to_turn())
                reasoning = ""
    return turns + _reasoning_turn(reasoning)


def _reasoning_turn(reasoning: str) -> list[Turn]:
    """The turn of an answer that ended within its reasoning."""
    turn = {"role": "assistant", "content": None, "reasoning_content": reasoning}
    return [turn] if reasoning else []


def _add_assistant_item(
    turns: list[Turn], item: MessageInput | CallInput, reasoning: str
) -> None:
    """Add an assistant's item, to its last turn where it belongs to that."""
    last: Turn = turns[-1] if turns else {"role": ""}
    # Text after calls belongs to the same answer: their outputs come later.
    same = isinstance(item, CallInput) or "tool_calls" in last
    if last["role"] != "assistant" or reasoning or not same:
        last = {"role": "assistant", "content": None}
        turns.append(last)
    if reasoning:
        last["reasoning_content"] = reasoning
    if isinstance(item, CallInput):
        last.setdefault("tool_calls", []).append(item.to_json())
    elif last["content"] is None:
        last["content"] = template_content(item.content)
    else:
        both = (last["content"], template_content(item.content))
        last["content"] = _PARAGRAPH.join(map(_text, both))


def _text(content: str | list[dict[str, str]]) -> str:
    texts = [content] if isinstance(content, str) else [one["text"] for one in content]
    return "".join(texts)


class FunctionTool(TypedObject):
    """A function that the model may call."""

    kinds = ("function",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (ANYTHING,),
        "defer_loading": (False,),
        "output_schema": (ANYTHING,),
    }
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def tool(self) -> ChatTool:
        """The tool in the form of a chat."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return ChatTool(type="function", function=function)

    def shown(self) -> dict[str, object]:
        """The tool as a response repeats it."""
        return self.model_dump()


class NamedFunction(TypedObject):
    """The function that must be called."""

    kinds = ("function",)
    name: str

    def to_chat(self) -> NamedTool:
        """The tool choice in the form of a chat."""
        return NamedTool(type="function", function=FunctionName(name=self.name))


class AllowedFunctions(TypedObject):
    """Only these functions may be called, whichever are in the prompt."""

    kinds = ("allowed_tools",)
    mode: Mode
    tools: Annotated[list[NamedFunction], Few, Field(min_length=1)]

    def to_chat(self) -> AllowedTools:
        """The tool choice in the form of a chat."""
        tools = [one.to_chat() for one in self.tools]
        return AllowedTools(
            type="allowed_tools",
            allowed_tools=AllowedToolList(mode=self.mode, tools=tools),
        )


FunctionChoice = Annotated[
    ChoiceWord | NamedFunction | AllowedFunctions,
    BeforeValidator(
        partial(read_choice, one=NamedFunction, some=AllowedFunctions),
        json_schema_input_type=ChoiceWord | NamedFunction | AllowedFunctions,
    ),
]
