"""The items of a response while they grow: reasoning, messages, calls.

One is open at a time; the next of another kind ends it. Their changes are `ItemEvent`s,
which a stream sends as events, each under its name.
"""

from typing import Final

from attrs import define, frozen

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
        about: JsonObject = {"id": self.id, "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def part(self) -> JsonObject:
        """The part with its text."""
        extra: JsonObject = {"annotations": [], "logprobs": []}
        return {"type": "output_text", "text": self.text, **extra}

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning."""
        part = {**self.part(), "text": ""}
        fields: JsonObject = {"content_index": 0, "part": part}
        return [ItemEvent("response.content_part.added", fields)]

    def append(self, text: str) -> ItemEvent:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text, "logprobs": []}
        return ItemEvent("response.output_text.delta", fields)

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        text: JsonObject = {"content_index": 0, "text": self.text, "logprobs": []}
        part: JsonObject = {"content_index": 0, "part": self.part()}
        return [
            ItemEvent("response.output_text.done", text),
            ItemEvent("response.content_part.done", part),
        ]


@define
class ReasoningItem:
    """Reasoning; its summary is always empty."""

    id: str
    text: str = ""

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        part = {"type": "reasoning_text", "text": self.text}
        content = [] if status == _RUNNING else [part]
        about: JsonObject = {"id": self.id, "type": "reasoning", "summary": []}
        return {**about, "status": status, "content": content}

    def start_events(self) -> list[ItemEvent]:
        """The events after its beginning."""
        part = {"type": "reasoning_text", "text": ""}
        fields: JsonObject = {"content_index": 0, "part": part}
        return [ItemEvent("response.content_part.added", fields)]

    def append(self, text: str) -> ItemEvent:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text}
        return ItemEvent("response.reasoning_text.delta", fields)

    def end_events(self) -> list[ItemEvent]:
        """The events before its end."""
        part = {"type": "reasoning_text", "text": self.text}
        return [
            ItemEvent(
                "response.reasoning_text.done", {"content_index": 0, "text": self.text}
            ),
            ItemEvent("response.content_part.done", {"content_index": 0, "part": part}),
        ]


@define
class CallItem:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    text: str = ""  # its arguments

    def to_json(self, status: str) -> JsonObject:
        """The item."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
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
        fields: JsonObject = {"name": self.name, "arguments": self.text}
        return [ItemEvent("response.function_call_arguments.done", fields)]


OutputItem = MessageItem | ReasoningItem | CallItem


class OutputItems:
    """The items of one response; their ids end like its own."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._done: list[JsonObject] = []
        self._open: OutputItem | None = None

    def start_message(self) -> list[ItemEvent]:
        """Begin a message, unless one is open."""
        if isinstance(self._open, MessageItem):
            return []
        return self._start(MessageItem(self._id("msg")))

    def take(self, delta: Delta) -> list[ItemEvent]:
        """The events for a delta."""
        match delta:
            case ContentDelta(text):
                start_events = self.start_message()
                return [*start_events, self._append(text)]
            case ReasoningDelta(text):
                start_events = []
                if not isinstance(self._open, ReasoningItem):
                    start_events = self._start(ReasoningItem(self._id("rs")))
                return [*start_events, self._append(text)]
            case CallStart(_, call_id, name):
                return self._start(CallItem(self._id("fc"), call_id, name))
            case Arguments(_, text):
                return [self._append(text)]
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

    def _append(self, text: str) -> ItemEvent:
        if self._open is None:
            raise AssertionError("no item is open")
        return self._with_item(self._open.append(text))

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
