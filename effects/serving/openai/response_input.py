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
    Allowed,
    AllowedTools,
    Choice,
    Function,
    Mode,
    Name,
    NamedTool,
    Tool,
    ToolName,
    read_choice,
)
from minfer.effects.serving.request_parsing.bodies import ANYTHING, shown, wrong
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    text_or_parts,
    told_content,
)

_OF_PARTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "logprobs": (ANYTHING,),
    "prompt_cache_breakpoint": (ANYTHING,),
}
_OF_ITEMS: Final[Mapping[str, tuple[Any, ...]]] = {
    "id": (ANYTHING,),
    "phase": (ANYTHING,),
    "status": (ANYTHING,),
}
_PARAGRAPH: Final = "\n\n"
Turn = dict[str, Any]  # a message for chat templates


class Part(TypedObject):
    """A piece of a message's text: of an input, or of an earlier output."""

    kinds = ("input_text", "output_text")
    neutral = _OF_PARTS
    text: str


def _role(role: object) -> object:
    """A role, by the name for which models were trained."""
    return "system" if role == "developer" else role


Parts = Annotated[str | list[Part], text_or_parts(Part, Few)]
Role = Annotated[
    Literal["system", "user", "assistant"],
    BeforeValidator(
        _role,
        json_schema_input_type=Literal["system", "developer", "user", "assistant"],
    ),
]


class Item(TypedObject):
    """A message; neutral fields are those that OpenAI's SDK returns with a response."""

    kinds = ("message",)
    neutral = _OF_ITEMS
    type: str = "message"
    role: Role
    content: Parts

    def told(self) -> Turn:
        """The message for chat templates."""
        return {"role": self.role, "content": told_content(self.content)}


class Call(TypedObject):
    """A call in an earlier response."""

    kinds = ("function_call",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_OF_ITEMS,
        "caller": (ANYTHING,),
        "parsed_arguments": (ANYTHING,),
    }
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str  # as they were written, whether JSON or not

    def told(self) -> Turn:
        """The call for chat templates."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class Output(TypedObject):
    """The output of a function for a call."""

    kinds = ("function_call_output",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_OF_ITEMS,
        "caller": (ANYTHING,),
    }
    call_id: str
    output: Parts

    def told(self) -> Turn:
        """The message for chat templates."""
        said = told_content(self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": said}


class ReasoningText(TypedObject):
    """A piece of reasoning."""

    kinds = ("reasoning_text",)
    text: str


class Reasoning(TypedObject):
    """The model's reasoning before an earlier answer."""

    kinds = ("reasoning",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_OF_ITEMS,
        "encrypted_content": (),
        "summary": (ANYTHING,),
    }
    content: Annotated[list[ReasoningText], Few] | None = None


_KINDS: Final[Mapping[str, type[Item | Call | Output | Reasoning]]] = {
    "message": Item,
    "function_call": Call,
    "function_call_output": Output,
    "reasoning": Reasoning,
}


def _item(given: object) -> object:
    """An item of the kind that its `type` names."""
    kind = given.get("type", "message") if isinstance(given, dict) else "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        there = " or ".join(map(shown, _KINDS))
        raise wrong(f"{shown(kind)} is not supported; there is {there}", "type")
    return _KINDS[kind].model_validate(given)


AnyItem = Annotated[
    Item | Call | Output | Reasoning,
    BeforeValidator(_item, json_schema_input_type=Item | Call | Output | Reasoning),
]


def check_outputs(items: Sequence[AnyItem]) -> None:
    """Raise the error in outputs, if any: each must belong to an earlier call."""
    made = set[str]()
    for at, item in enumerate(items):
        if isinstance(item, Call):
            made.add(item.call_id)
        if isinstance(item, Output) and item.call_id not in made:
            where = f"input[{at}].call_id"
            raise wrong("must be that of a call in an earlier item", where)


def turns_of(items: Sequence[AnyItem]) -> list[Turn]:
    """Items as messages: successive items of the assistant's answer are one."""
    turns: list[Turn] = []
    thought = ""
    for item in items:
        match item:
            case Reasoning():
                texts = [part.text for part in item.content or ()]
                thought = "\n".join([thought, *texts] if thought else texts)
            case Call() | Item(role="assistant"):
                _say(turns, item, thought)
                thought = ""
            case _:
                turns += _thinking(thought)
                turns.append(item.told())
                thought = ""
    return turns + _thinking(thought)


def _thinking(thought: str) -> list[Turn]:
    """The turn of an answer that ended within its reasoning."""
    turn = {"role": "assistant", "content": None, "reasoning_content": thought}
    return [turn] if thought else []


def _say(turns: list[Turn], item: Item | Call, thought: str) -> None:
    """Add an assistant's item, to its last turn where it belongs to that."""
    last: Turn = turns[-1] if turns else {"role": ""}
    # Text after calls belongs to the same answer: their outputs come later.
    same = isinstance(item, Call) or "tool_calls" in last
    if last["role"] != "assistant" or thought or not same:
        last = {"role": "assistant", "content": None}
        turns.append(last)
    if thought:
        last["reasoning_content"] = thought
    if isinstance(item, Call):
        last.setdefault("tool_calls", []).append(item.told())
    elif last["content"] is None:
        last["content"] = told_content(item.content)
    else:
        both = (last["content"], told_content(item.content))
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

    def tool(self) -> Tool:
        """The tool in the form of a chat."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)

    def shown(self) -> dict[str, object]:
        """The tool as a response repeats it."""
        return self.model_dump()


class NamedFunction(TypedObject):
    """The function that must be called."""

    kinds = ("function",)
    name: str

    def named(self) -> NamedTool:
        """The tool choice in the form of a chat."""
        return NamedTool(type="function", function=Name(name=self.name))


class AllowedFunctions(TypedObject):
    """Only these functions may be called, whichever are in the prompt."""

    kinds = ("allowed_tools",)
    mode: Mode
    tools: Annotated[list[NamedFunction], Few, Field(min_length=1)]

    def named(self) -> AllowedTools:
        """The tool choice in the form of a chat."""
        tools = [one.named() for one in self.tools]
        return AllowedTools(
            type="allowed_tools", allowed_tools=Allowed(mode=self.mode, tools=tools)
        )


FunctionChoice = Annotated[
    Choice | NamedFunction | AllowedFunctions,
    BeforeValidator(
        partial(read_choice, one=NamedFunction, some=AllowedFunctions),
        json_schema_input_type=Choice | NamedFunction | AllowedFunctions,
    ),
]
