"""The items of a response while they grow: reasoning, messages, calls.

One is open at a time; the next of another kind ends it. Their changes are `ItemEvent`s,
which a stream sends as events, each under its name.
"""

import json
from collections.abc import Mapping
from typing import Final

from attrs import define, frozen
from pydantic_core import from_json

from minfer.effects.serving.access import reasoning_cipher
from minfer.effects.serving.openai.response_tools import INPUT_ARGUMENT
from minfer.effects.serving.protocol import CallTarget
from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
)

JsonObject = dict[str, object]
_RUNNING: Final = "in_progress"


@frozen
class ItemEvent:
    """A change: the name of an event, and its fields."""

    name: str
    fields: JsonObject


@define
class MessageItem:
    """A message, with one part: its text."""

    id: str
    text: str = ""

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        content = [] if status == _RUNNING else [self.part()]
        fields: JsonObject = {"id": self.id, "type": "message", "role": "assistant"}
        return {**fields, "status": status, "content": content}

    def part(self) -> JsonObject:
        """The part with its text."""
        extra: JsonObject = {"annotations": [], "logprobs": []}
        return {"type": "output_text", "text": self.text, **extra}

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning."""
        content_part = {**self.part(), "text": ""}
        fields: JsonObject = {"content_index": 0, "part": content_part}
        return [ItemEvent("response.content_part.added", fields)]

    def append(self, text: str) -> ItemEvent:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text, "logprobs": []}
        return ItemEvent("response.output_text.delta", fields)

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        text: JsonObject = {"content_index": 0, "text": self.text, "logprobs": []}
        content_part: JsonObject = {"content_index": 0, "part": self.part()}
        return [
            ItemEvent("response.output_text.done", text),
            ItemEvent("response.content_part.done", content_part),
        ]


@define
class ReasoningItem:
    """Reasoning; its summary is always empty. With a key, its end has it encrypted,
    too.
    """

    id: str
    text: str = ""
    key: bytes = b""

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        content_part = {"type": "reasoning_text", "text": self.text}
        content = [] if status == _RUNNING else [content_part]
        fields: JsonObject = {"id": self.id, "type": "reasoning", "summary": []}
        if self.key and status != _RUNNING:
            fields["encrypted_content"] = reasoning_cipher.encrypt(self.key, self.text)
        return {**fields, "status": status, "content": content}

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning."""
        content_part = {"type": "reasoning_text", "text": ""}
        fields: JsonObject = {"content_index": 0, "part": content_part}
        return [ItemEvent("response.content_part.added", fields)]

    def append(self, text: str) -> ItemEvent:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text}
        return ItemEvent("response.reasoning_text.delta", fields)

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        content_part = {"type": "reasoning_text", "text": self.text}
        return [
            ItemEvent(
                "response.reasoning_text.done", {"content_index": 0, "text": self.text}
            ),
            ItemEvent(
                "response.content_part.done", {"content_index": 0, "part": content_part}
            ),
        ]


@define
class CallItem:
    """A call of a function."""

    id: str
    call_id: str
    target: CallTarget
    text: str = ""  # its arguments

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            **_name_fields(self.target),
            "arguments": self.text,
        }

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning: none."""
        return []

    def append(self, text: str) -> ItemEvent:
        """The event for more of its arguments."""
        self.text += text
        return ItemEvent("response.function_call_arguments.delta", {"delta": text})

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        fields: JsonObject = {"name": self.target.name, "arguments": self.text}
        return [ItemEvent("response.function_call_arguments.done", fields)]


@define
class CustomCallItem:
    """A call of a custom tool. Its input is known once the arguments of the function that
    stands for the tool are complete.
    """

    id: str
    call_id: str
    target: CallTarget
    text: str = ""  # the function's arguments

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        return {
            "id": self.id,
            "type": "custom_tool_call",
            "status": status,
            "call_id": self.call_id,
            **_name_fields(self.target),
            "input": "" if status == _RUNNING else _input_of(self.text),
        }

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning: none."""
        return []

    def append(self, text: str) -> None:
        """Keep more of the arguments."""
        self.text += text

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        text = _input_of(self.text)
        return [
            ItemEvent("response.custom_tool_call_input.delta", {"delta": text}),
            ItemEvent("response.custom_tool_call_input.done", {"input": text}),
        ]


def _name_fields(target: CallTarget) -> JsonObject:
    namespace = {"namespace": target.namespace} if target.namespace else {}
    return {"name": target.name, **namespace}


def _input_of(arguments: str) -> str:
    """The input in the arguments of a function that stands for a custom tool; arguments
    that are of another form are the input.
    """
    try:
        parsed = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = parsed.get(INPUT_ARGUMENT, "") if isinstance(parsed, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class OutputItems:
    """The items of one response; their ids end like its own. `targets` are the tools of
    calls that clients know otherwise than the model, `key` is that of reasoning that
    clients keep, if they want it.
    """

    def __init__(
        self,
        suffix: str,
        targets: Mapping[str, CallTarget] | None = None,
        key: bytes = b"",
    ) -> None:
        self._suffix = suffix
        self._targets = targets or {}
        self._key = key
        self._done: list[JsonObject] = []
        self._open: OutputItem | None = None

    def start_message(self) -> list[ItemEvent]:
        """Begin a message, unless one is open."""
        if isinstance(self._open, MessageItem):
            return []
        return self._start(MessageItem(self._id("msg")))

    def add(self, delta: Delta) -> list[ItemEvent]:
        """The events for a delta."""
        match delta:
            case ContentDelta(text):
                start_events = self.start_message()
                return [*start_events, *self._append(text)]
            case ReasoningDelta(text):
                start_events = []
                if not isinstance(self._open, ReasoningItem):
                    item = ReasoningItem(self._id("rs"), key=self._key)
                    start_events = self._start(item)
                return [*start_events, *self._append(text)]
            case CallStart(_, call_id, name):
                return self._start(self._call(call_id, name))
            case Arguments(_, text):
                return self._append(text)
            case CallEnd(_, whole):
                return self._end("completed" if whole else "incomplete")

    def close(self, status: str) -> list[ItemEvent]:
        """End the last item, with its events; a response without any gets a message."""
        start_events = [] if self._open or self._done else self.start_message()
        return [*start_events, *self._end(status)]

    def to_json(self) -> list[JsonObject]:
        """All items that have ended."""
        return self._done

    def _id(self, prefix: str) -> str:
        """An id for the next item."""
        count = len(self._done) + (self._open is not None)
        return f"{prefix}{self._suffix}" + (f"-{count}" if count else "")

    def _start(self, item: OutputItem) -> list[ItemEvent]:
        end_events = self._end("completed")
        self._open = item
        fields: JsonObject = {"item": item.to_json(_RUNNING)}
        first = self._with_index(ItemEvent("response.output_item.added", fields))
        return [*end_events, first, *map(self._with_item, item.start_events())]

    def _call(self, call_id: str, name: str) -> CallItem | CustomCallItem:
        target = self._targets.get(name) or CallTarget(name=name)
        if target.custom:
            return CustomCallItem(self._id("ctc"), call_id, target)
        return CallItem(self._id("fc"), call_id, target)

    def _append(self, text: str) -> list[ItemEvent]:
        if self._open is None:
            raise AssertionError("no item is open")
        event = self._open.append(text)
        return [] if event is None else [self._with_item(event)]

    def _end(self, status: str) -> list[ItemEvent]:
        if (item := self._open) is None:
            return []
        item_json = item.to_json(status)
        last = self._with_index(
            ItemEvent("response.output_item.done", {"item": item_json})
        )
        end_events = [*map(self._with_item, item.end_events()), last]
        self._open = None
        self._done.append(item_json)
        return end_events

    def _with_index(self, event: ItemEvent) -> ItemEvent:
        """The event with the index of the open item."""
        return ItemEvent(event.name, {"output_index": len(self._done), **event.fields})

    def _with_item(self, event: ItemEvent) -> ItemEvent:
        """Likewise, with the item's id too."""
        item_id = "" if self._open is None else self._open.id
        placed = self._with_index(event)
        return ItemEvent(event.name, {"item_id": item_id, **placed.fields})
