"""How a response is written: as one object, or as a stream of named, numbered events.

response.created, response.in_progress      the response, as yet without output
response.output_item.added                  its message
response.content_part.added                 the message's text, empty
response.output_text.delta, again and again
response.output_text.done, response.content_part.done, response.output_item.done
response.completed or response.incomplete   the whole response
"""

import json
import time
from collections.abc import Sequence
from typing import Final

from minfer.effects.serving.openai.writing import JsonObject
from minfer.effects.serving.protocol import GenerationRequest, Served, Writer
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer

# What nobody can ask for otherwise, for now.
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
    """What a response cost, in tokens."""
    output = served.metrics.output_tokens
    return {
        "input_tokens": served.prompt_tokens,
        # What was written to the cache is not known; it is for free.
        "input_tokens_details": {
            "cached_tokens": served.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": served.prompt_tokens + output,
    }


class _Shape:
    """What a response and its one message look like, at any time."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self.item_id = stamp.id.replace("resp", "msg", 1)
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

    def item(self, status: str, content: Sequence[JsonObject]) -> JsonObject:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def part(text: str) -> JsonObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(delta: CompletionOutput) -> str:
    """What has become of a response that has ended."""
    return "incomplete" if delta.finish_reason == "length" else "completed"


class ResponseEvents:
    """Writes a stream."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._shape = _Shape(stamp, request)
        self._number = 0  # of the next event
        self._text = ""
        self._status = _RUNNING

    def write(self, _: int, delta: CompletionOutput) -> list[Event]:
        """The events for what is new of the text."""
        events = [] if self._number else self._begin()
        self._text += delta.text
        if delta.text:
            more = {"delta": delta.text, "logprobs": []}
            events.append(self._of_part("response.output_text.delta", **more))
        if delta.finish_reason:
            self._status = _status(delta)
        return events

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The ends of all that was begun."""
        part = self._shape.part(self._text)
        item = self._shape.item(self._status, [part])
        whole = self._shape.response(self._status, [item], served[0])
        text: JsonObject = {"text": self._text, "logprobs": []}
        return [
            self._of_part("response.output_text.done", **text),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{self._status}", response=whole),
        ]

    def _begin(self) -> list[Event]:
        running = self._shape.response(_RUNNING, [])
        item = self._shape.item(_RUNNING, [])
        return [
            self._event("response.created", response=running),
            self._event("response.in_progress", response=running),
            self._event("response.output_item.added", output_index=0, item=item),
            self._of_part("response.content_part.added", part=self._shape.part("")),
        ]

    def _of_part(self, kind: str, **fields: object) -> Event:
        """An event about the one part of the one message."""
        where: JsonObject = {"output_index": 0, "content_index": 0}
        return self._event(kind, item_id=self._shape.item_id, **where, **fields)

    def _event(self, kind: str, **fields: object) -> Event:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return Event(json.dumps(told), kind)


class ResponseObject:
    """Writes a response in one piece."""

    def __init__(self, stamp: Stamp, request: GenerationRequest) -> None:
        self._shape = _Shape(stamp, request)
        self._text = ""
        self._status = _RUNNING

    def write(self, _: int, delta: CompletionOutput) -> list[Event]:
        """Keep the text, which comes whole."""
        self._text += delta.text
        self._status = _status(delta)
        return []

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The response."""
        item = self._shape.item(self._status, [self._shape.part(self._text)])
        whole = self._shape.response(self._status, [item], served[0])
        return [Event(json.dumps(whole))]


def writer(stamp: Stamp, request: GenerationRequest, _: Tokenizer | None) -> Writer:
    """What writes a response as it was asked for."""
    kind = ResponseEvents if request.stream else ResponseObject
    return kind(stamp, request)
