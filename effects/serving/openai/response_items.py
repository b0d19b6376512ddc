"""The items of a response while they grow: reasoning, messages, calls.

One is open at a time; the next of another kind ends it. Their changes are `Happening`s,
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
class Happening:
    """A change: the name of an event, and its fields."""

    name: str
    fields: JsonObject


@define
class Message:
    """A message, with one part: its text."""

    id: str
    text: str = ""

    def told(self, status: str) -> JsonObject:
        """The item."""
        content = [] if status == _RUNNING else [self.part()]
        about: JsonObject = {"id": self.id, "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def part(self) -> JsonObject:
        """The part with its text."""
        more: JsonObject = {"annotations": [], "logprobs": []}
        return {"type": "output_text", "text": self.text, **more}

    def begun(self) -> list[Happening]:
        """The events after its beginning."""
        part = {**self.part(), "text": ""}
        fields: JsonObject = {"content_index": 0, "part": part}
        return [Happening("response.content_part.added", fields)]

    def more(self, text: str) -> Happening:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text, "logprobs": []}
        return Happening("response.output_text.delta", fields)

    def ended(self) -> list[Happening]:
        """The events before its end."""
        text: JsonObject = {"content_index": 0, "text": self.text, "logprobs": []}
        part: JsonObject = {"content_index": 0, "part": self.part()}
        return [
            Happening("response.output_text.done", text),
            Happening("response.content_part.done", part),
        ]


@define
class Thought:
    """Reasoning; its summary is always empty."""

    id: str
    text: str = ""

    def told(self, status: str) -> JsonObject:
        """The item."""
        part = {"type": "reasoning_text", "text": self.text}
        content = [] if status == _RUNNING else [part]
        about: JsonObject = {"id": self.id, "type": "reasoning", "summary": []}
        return {**about, "status": status, "content": content}

    def begun(self) -> list[Happening]:
        """The events after its beginning."""
        part = {"type": "reasoning_text", "text": ""}
        fields: JsonObject = {"content_index": 0, "part": part}
        return [Happening("response.content_part.added", fields)]

    def more(self, text: str) -> Happening:
        """The event for more of its text."""
        self.text += text
        fields: JsonObject = {"content_index": 0, "delta": text}
        return Happening("response.reasoning_text.delta", fields)

    def ended(self) -> list[Happening]:
        """The events before its end."""
        part = {"type": "reasoning_text", "text": self.text}
        return [
            Happening(
                "response.reasoning_text.done", {"content_index": 0, "text": self.text}
            ),
            Happening("response.content_part.done", {"content_index": 0, "part": part}),
        ]


@define
class Called:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    text: str = ""  # its arguments

    def told(self, status: str) -> JsonObject:
        """The item."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def begun(self) -> list[Happening]:
        """The events after its beginning: none."""
        return []

    def more(self, text: str) -> Happening:
        """The event for more of its arguments."""
        self.text += text
        return Happening("response.function_call_arguments.delta", {"delta": text})

    def ended(self) -> list[Happening]:
        """The events before its end."""
        fields: JsonObject = {"name": self.name, "arguments": self.text}
        return [Happening("response.function_call_arguments.done", fields)]


Item = Message | Thought | Called


class Items:
    """The items of one response; their ids end like its own."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._done: list[JsonObject] = []
        self._open: Item | None = None

    def begin_message(self) -> list[Happening]:
        """Begin a message, unless one is open."""
        if isinstance(self._open, Message):
            return []
        return self._begin(Message(self._id("msg")))

    def take(self, delta: Delta) -> list[Happening]:
        """The events for a delta."""
        match delta:
            case ContentDelta(text):
                begun = self.begin_message()
                return [*begun, self._more(text)]
            case ReasoningDelta(text):
                begun = []
                if not isinstance(self._open, Thought):
                    begun = self._begin(Thought(self._id("rs")))
                return [*begun, self._more(text)]
            case CallStart(_, call_id, name):
                return self._begin(Called(self._id("fc"), call_id, name))
            case Arguments(_, text):
                return [self._more(text)]
            case CallEnd(_, whole):
                return self._end("completed" if whole else "incomplete")

    def close(self, status: str) -> list[Happening]:
        """End the last item, with its events; a response without any gets a message."""
        begun = [] if self._open or self._done else self.begin_message()
        return [*begun, *self._end(status)]

    def told(self) -> list[JsonObject]:
        """All items that have ended."""
        return self._done

    def _id(self, prefix: str) -> str:
        """An id for the next item."""
        count = len(self._done) + (self._open is not None)
        return f"{prefix}{self._suffix}" + (f"-{count}" if count else "")

    def _begin(self, item: Item) -> list[Happening]:
        ended = self._end("completed")
        self._open = item
        fields: JsonObject = {"item": item.told(_RUNNING)}
        first = self._placed(Happening("response.output_item.added", fields))
        return [*ended, first, *map(self._about, item.begun())]

    def _more(self, text: str) -> Happening:
        if self._open is None:
            raise AssertionError("no item is open")
        return self._about(self._open.more(text))

    def _end(self, status: str) -> list[Happening]:
        if (item := self._open) is None:
            return []
        told = item.told(status)
        last = self._placed(Happening("response.output_item.done", {"item": told}))
        ended = [*map(self._about, item.ended()), last]
        self._open = None
        self._done.append(told)
        return ended

    def _placed(self, one: Happening) -> Happening:
        """The event with the index of the open item."""
        return Happening(one.name, {"output_index": len(self._done), **one.fields})

    def _about(self, one: Happening) -> Happening:
        """Likewise, with the item's id too."""
        item_id = "" if self._open is None else self._open.id
        placed = self._placed(one)
        return Happening(one.name, {"item_id": item_id, **placed.fields})
