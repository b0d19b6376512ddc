"""Writers of a response: as one object, or as a stream of named, numbered events.

response.created, response.in_progress      the response, as yet without output
response.output_item.added                  of each item, as `response_items` has them
...
response.output_item.done
response.completed or response.incomplete   the whole response
"""

import json
import time
from collections.abc import Sequence
from typing import Final

from minfer.effects.serving.openai.response_items import Happening, Items
from minfer.effects.serving.openai.writing import JsonObject
from minfer.effects.serving.protocol import GenerationRequest, Served, Writer
from minfer.effects.serving.request_parsing.answer_parsing import Parsed
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Event
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer

# Fields that no request can change, for now.
_SETTLED: Final[JsonObject] = {
    "background": False,
    "error": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
_RUNNING: Final = "in_progress"


def usage_of(served: Served) -> JsonObject:
    """The tokens of a response."""
    output = served.metrics.output_tokens
    return {
        "input_tokens": served.prompt_tokens,
        # The number of tokens written to the cache is not known; they are free.
        "input_tokens_details": {
            "cached_tokens": served.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": served.prompt_tokens + output,
    }


class _Shape:
    """The format of a response, at any time."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._head: JsonObject = {
            "id": stamp.id,
            "object": "response",
            "created_at": stamp.created,
            "model": stamp.model,
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            **_SETTLED,
            **request.include.repeat,
        }

    def response(
        self, status: str, output: Sequence[JsonObject], served: Served | None = None
    ) -> JsonObject:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        cost = {} if served is None else {"usage": usage_of(served)}
        return {
            **self._head,
            **cost,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": cut,
            "output": output,
        }


def _status(delta: CompletionOutput) -> str:
    """The status of a response that has ended."""
    return "incomplete" if delta.finish_reason == "length" else "completed"


class ResponseEvents:
    """Writes a stream."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._shape = _Shape(stamp, request)
        self._items = Items(stamp.id.removeprefix("resp"))
        self._parsed = Parsed(request)
        self._plain = request.parsing is None
        self._number = 0  # of the next event
        self._status = _RUNNING

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """The events for the new output."""
        events = [] if self._number else self._begin()
        for one in self._parsed.read(choice, delta):
            events += map(self._event, self._items.take(one))
        if delta.finish_reason:
            self._status = _status(delta)
        return events

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The events that end the response and what is open in it."""
        events = [self._event(one) for one in self._items.close(self._status)]
        whole = self._shape.response(self._status, self._items.told(), served[0])
        last = Happening(f"response.{self._status}", {"response": whole})
        return [*events, self._event(last)]

    def _begin(self) -> list[Event]:
        running: JsonObject = {"response": self._shape.response(_RUNNING, [])}
        happened = [
            Happening("response.created", running),
            Happening("response.in_progress", running),
            *(self._items.begin_message() if self._plain else []),
        ]
        return [self._event(one) for one in happened]

    def _event(self, one: Happening) -> Event:
        told = {"type": one.name, "sequence_number": self._number, **one.fields}
        self._number += 1
        return Event(json.dumps(told), one.name)


class ResponseObject:
    """Writes a response as one object."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._shape = _Shape(stamp, request)
        self._items = Items(stamp.id.removeprefix("resp"))
        self._parsed = Parsed(request)
        self._status = _RUNNING

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """Keep the output, which is complete."""
        for one in self._parsed.read(choice, delta):
            self._items.take(one)
        self._status = _status(delta)
        return []

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The response."""
        self._items.close(self._status)
        whole = self._shape.response(self._status, self._items.told(), served[0])
        return [Event(json.dumps(whole))]


def writer(stamp: Stamp, request: GenerationRequest, _: Tokenizer | None) -> Writer:
    """The writer of a response, by the request's `stream`."""
    kind = ResponseEvents if request.stream else ResponseObject
    return kind(stamp, request)
