"""POST /v1/messages: a conversation is answered, as Anthropic's API does.

whole     message {content: [one text block], stop_reason, usage}
stream    message_start, content_block_start, ping,
          content_block_delta, again and again,
          content_block_stop, message_delta {stop_reason, usage}, message_stop
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from attrs import frozen
from pydantic import Field

from minfer.effects.live.edge import Urgency
from minfer.effects.live.prompts import Asked
from minfer.effects.serving.anthropic.conversation import ConversationBody, Metadata
from minfer.effects.serving.anthropic.errors import failure
from minfer.effects.serving.bodies import read_body
from minfer.effects.serving.protocol import (
    Endpoint,
    GenerationRequest,
    Grounds,
    Include,
    Served,
    Writer,
)
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.params import MAX_STOP_LENGTH, MAX_STOPS

JsonObject = dict[str, object]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]

Stops = Field(fail_fast=True, max_length=MAX_STOPS)


class MessagesBody(ConversationBody):
    """A conversation, and how it is to be answered."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    metadata: Metadata | None = None
    stop_sequences: Annotated[list[Stop], Stops] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: float | None = None

    def generation(self, llm: Grounds) -> GenerationRequest:
        """The conversation as one prompt. Raises ChatTemplateError, RequestError and
        ParameterError.
        """
        names = {"max_tokens", "temperature", "top_k", "top_p"}
        given = self.model_dump(include=names, exclude_none=True)
        stops = tuple(self.stop_sequences or ())
        params = llm.setup.default_sampling_params(**given, stop=stops)
        return GenerationRequest(
            prompts=(Asked(None, self.ids(llm)),),
            params=params,
            urgency=Urgency(client=self.metadata.user_id if self.metadata else ""),
            stream=self.stream,
            include=Include(),
            wanted_by="max_tokens",
        )


@frozen
class Stopped:
    """Why an answer ended, in Anthropic's words."""

    reason: str | None = None  # None: it has not ended
    sequence: str | None = None  # of `stop_sequences`

    @classmethod
    def of(cls, delta: CompletionOutput) -> "Stopped":
        """What the last of an answer tells."""
        if delta.finish_reason == "length":
            return cls("max_tokens")
        if isinstance(delta.stop_reason, str):
            return cls("stop_sequence", delta.stop_reason)
        return cls("end_turn")

    def told(self) -> JsonObject:
        """As fields of a message."""
        return {"stop_reason": self.reason, "stop_sequence": self.sequence}


def usage_of(served: Served) -> JsonObject:
    """What an answer cost, in tokens; those found in the prefix cache count apart."""
    return {
        "input_tokens": served.prompt_tokens - served.cached_tokens,
        "cache_creation_input_tokens": 0,  # caching is for free: none is counted as such
        "cache_read_input_tokens": served.cached_tokens,
        "output_tokens": served.metrics.output_tokens,
    }


def _message(
    stamp: Stamp, texts: Sequence[str], stopped: Stopped, usage: JsonObject
) -> JsonObject:
    return {
        "id": stamp.id,
        "type": "message",
        "role": "assistant",
        "model": stamp.model,
        "content": [{"type": "text", "text": text} for text in texts],
        **stopped.told(),
        "usage": usage,
    }


class MessageEvents:
    """Writes a stream: one block, and what is new of its text."""

    def __init__(self, stamp: Stamp, prompt_tokens: int) -> None:
        self._stamp = stamp
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self._stopped = Stopped()

    def write(self, _: int, delta: CompletionOutput) -> list[Event]:
        """The events for what is new of the text."""
        events = [] if self._begun else self._begin()
        self._begun = True
        if delta.text:
            text = {"type": "text_delta", "text": delta.text}
            events.append(_event("content_block_delta", index=0, delta=text))
        if delta.finish_reason:
            self._stopped = Stopped.of(delta)
        return events

    def end(self, served: Sequence[Served]) -> list[Event]:
        """Why it ended, and what it cost."""
        usage = usage_of(served[0])
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=self._stopped.told(), usage=usage),
            _event("message_stop"),
        ]

    def _begin(self) -> list[Event]:
        # What of the prompt was cached is told at the end, when it is known.
        usage: JsonObject = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = _message(self._stamp, (), self._stopped, usage)
        block = {"type": "text", "text": ""}
        return [
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block=block),
            _event("ping"),
        ]


class MessageObject:
    """Writes an answer in one piece."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._text = ""
        self._stopped = Stopped()

    def write(self, _: int, delta: CompletionOutput) -> list[Event]:
        """Keep the text, which comes whole."""
        self._text += delta.text
        self._stopped = Stopped.of(delta)
        return []

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The answer."""
        usage = usage_of(served[0])
        return [
            Event(json.dumps(_message(self._stamp, [self._text], self._stopped, usage)))
        ]


def _event(kind: str, **fields: Any) -> Event:
    return Event(json.dumps({"type": kind, **fields}), kind)


def writer(stamp: Stamp, request: GenerationRequest, _: Tokenizer | None) -> Writer:
    """What writes an answer as it was asked for."""
    if request.stream:
        return MessageEvents(stamp, len(request.prompts[0].ids))
    return MessageObject(stamp)


ENDPOINT: Final = Endpoint(
    name="messages",
    path="/v1/messages",
    summary="Answer a conversation, as Anthropic's API does.",
    body=MessagesBody,
    id_prefix="msg",
    prompt_field="messages",
    read=partial(read_body, MessagesBody),
    writer=writer,
    failure=failure,
)
