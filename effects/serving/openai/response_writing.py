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

from minfer.effects.serving.openai.response_items import ItemEvent, OutputItems
from minfer.effects.serving.openai.writing import JsonObject
from minfer.effects.serving.protocol import AnswerWriter, GenerationRequest, PromptUsage
from minfer.effects.serving.request_parsing.answer_parsing import AnswerParser
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer

# Fields that no request can change, for now.
_FIXED_FIELDS: Final[JsonObject] = {
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


def usage_of(served: PromptUsage, reasoning_tokens: int) -> JsonObject:
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
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": served.prompt_tokens + output,
    }


class _ResponseBuilder:
    """The format of a response, at any time."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._head: JsonObject = {
            "id": stamp.id,
            "object": "response",
            "created_at": stamp.created,
            "model": stamp.model,
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            **_FIXED_FIELDS,
            **request.include.repeat,
        }

    def response(
        self, status: str, output: Sequence[JsonObject], usage: JsonObject | None = None
    ) -> JsonObject:
        incomplete_details = (
            {"reason": "max_output_tokens"} if status == "incomplete" else None
        )
        usage_field = {} if usage is None else {"usage": usage}
        return {
            **self._head,
            **usage_field,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": incomplete_details,
            "output": output,
        }


def _status(delta: CompletionOutput) -> str:
    """The status of a response that has ended."""
    return "incomplete" if delta.finish_reason == "length" else "completed"


def _items_of(stamp: Stamp, request: GenerationRequest) -> OutputItems:
    include = request.include
    suffix = stamp.id.removeprefix("resp")
    return OutputItems(suffix, include.call_targets, include.reasoning_key)


class ResponseEvents:
    """Writes a stream."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        self._format = _ResponseBuilder(stamp, request)
        self._items = _items_of(stamp, request)
        self._parser = AnswerParser(request, tokenizer)
        self._plain = request.parsing is None
        self._number = 0  # of the next event
        self._status = _RUNNING

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """The events for the new output."""
        events = [] if self._number else self._start_events()
        for event in self._parser.read(choice, delta):
            events += map(self._make_event, self._items.add(event))
        if delta.finish_reason:
            self._status = _status(delta)
        return events

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The events that end the open item and the response."""
        events = [self._make_event(event) for event in self._items.close(self._status)]
        usage = usage_of(served[0], self._parser.reasoning_tokens)
        response = self._format.response(self._status, self._items.to_json(), usage)
        last = ItemEvent(f"response.{self._status}", {"response": response})
        return [*events, self._make_event(last)]

    def _start_events(self) -> list[StreamEvent]:
        running: JsonObject = {"response": self._format.response(_RUNNING, [])}
        events = [
            ItemEvent("response.created", running),
            ItemEvent("response.in_progress", running),
            *(self._items.start_message() if self._plain else []),
        ]
        return [self._make_event(event) for event in events]

    def _make_event(self, event: ItemEvent) -> StreamEvent:
        item_json = {"type": event.name, "sequence_number": self._number, **event.fields}
        self._number += 1
        return StreamEvent(json.dumps(item_json), event.name)


class ResponseObject:
    """Writes a response as one object."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        self._format = _ResponseBuilder(stamp, request)
        self._items = _items_of(stamp, request)
        self._parser = AnswerParser(request, tokenizer)
        self._status = _RUNNING

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """Keep the output, which is complete."""
        for event in self._parser.read(choice, delta):
            self._items.add(event)
        self._status = _status(delta)
        return []

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The response."""
        self._items.close(self._status)
        usage = usage_of(served[0], self._parser.reasoning_tokens)
        response = self._format.response(self._status, self._items.to_json(), usage)
        return [StreamEvent(json.dumps(response))]


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> AnswerWriter:
    """The writer of a response, by the request's `stream`."""
    kind = ResponseEvents if request.stream else ResponseObject
    return kind(stamp, request, tokenizer)
