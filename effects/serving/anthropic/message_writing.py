"""Writers of a message of Anthropic's API: as one object, or as a stream of events.

whole     message {content: blocks of reasoning, text, calls, stop_reason, usage}
stream    message_start, ping,
          for each block: content_block_start, content_block_delta, again and again,
          content_block_stop,
          message_delta {stop_reason, usage}, message_stop

An answer that can only be text begins its block with the message.
"""

import json
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from minfer.effects.serving.protocol import AnswerWriter, GenerationRequest, PromptUsage
from minfer.effects.serving.request_parsing.answer_parsing import (
    AnswerParser,
    ParsedAnswer,
    ParsedCall,
)
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
)

JsonObject = dict[str, object]


@frozen
class StopReason:
    """The stop reason of an answer, in Anthropic's words."""

    reason: str | None = None  # None: it has not ended
    sequence: str | None = None  # of `stop_sequences`

    @classmethod
    def of(cls, delta: CompletionOutput, *, calls: bool) -> "StopReason":
        """The stop reason of an answer's last output."""
        if delta.finish_reason == "length":
            return cls("max_tokens")
        if calls:
            return cls("tool_use")
        if isinstance(delta.stop_reason, str):
            return cls("stop_sequence", delta.stop_reason)
        return cls("end_turn")

    def to_json(self) -> JsonObject:
        """The fields of a message."""
        return {"stop_reason": self.reason, "stop_sequence": self.sequence}


def usage_of(served: PromptUsage, thinking_tokens: int) -> JsonObject:
    """The tokens of an answer; those found in the prefix cache are counted separately."""
    return {
        "input_tokens": served.prompt_tokens - served.cached_tokens,
        "cache_creation_input_tokens": 0,  # caching is for free: none is counted as such
        "cache_read_input_tokens": served.cached_tokens,
        "output_tokens": served.metrics.output_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def _message(
    stamp: Stamp, blocks: Sequence[JsonObject], stop_reason: StopReason, usage: JsonObject
) -> JsonObject:
    return {
        "id": stamp.id,
        "type": "message",
        "role": "assistant",
        "model": stamp.model,
        "content": blocks,
        **stop_reason.to_json(),
        "usage": usage,
    }


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _thinking(text: str) -> JsonObject:
    # No other server has to trust it, so it needs no signature.
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name_id: str, name: str, arguments: object) -> JsonObject:
    return {"type": "tool_use", "id": name_id, "name": name, "input": arguments}


class MessageEvents:
    """Writes a stream: one block after the other, each in deltas."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        self._stamp = stamp
        self._repeated = request.include.repeat
        self._prompt_tokens = len(request.prompts[0].ids)
        self._parser = AnswerParser(request, tokenizer)
        self._plain = request.parsing is None
        self._started = False
        self._open = ""  # the type of the block that is open
        self._blocks = 0  # that were opened
        self._stopped = StopReason()

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """The events for the new output."""
        events = [] if self._started else self._start_events()
        self._started = True
        for parsed_delta in self._parser.read(choice, delta):
            events += self._delta_events(parsed_delta)
        if delta.finish_reason:
            self._stopped = StopReason.of(delta, calls=self._parser.calls(choice))
        return events

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The last events: the stop reason and the usage."""
        usage = usage_of(served[0], self._parser.reasoning_tokens)
        empty = [] if self._blocks else self._open_block("text", _text(""))
        return [
            *empty,
            *self._close(),
            _event(
                "message_delta",
                delta=self._stopped.to_json(),
                usage=usage,
                **self._repeated,
            ),
            _event("message_stop"),
        ]

    def _start_events(self) -> list[StreamEvent]:
        # The number of cached prompt tokens is sent at the end, when it is known.
        usage: JsonObject = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = _message(self._stamp, (), self._stopped, usage)
        block = self._open_block("text", _text("")) if self._plain else []
        return [_event("message_start", message=message), *block, _event("ping")]

    def _delta_events(self, delta: Delta) -> list[StreamEvent]:
        match delta:
            case ContentDelta(text):
                opening = self._open_block("text", _text(""))
                return [*opening, self._delta_event(type="text_delta", text=text)]
            case ReasoningDelta(text):
                opening = self._open_block("thinking", _thinking(""))
                return [*opening, self._delta_event(type="thinking_delta", thinking=text)]
            case CallStart(_, name_id, name):
                return self._open_block("tool_use", _tool_use(name_id, name, {}))
            case Arguments(_, text):
                return [self._delta_event(type="input_json_delta", partial_json=text)]
            case CallEnd():
                return self._close()

    def _open_block(self, kind: str, block: JsonObject) -> list[StreamEvent]:
        """Begin a block, unless one of that type is open."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        self._blocks += 1
        index = self._blocks - 1
        return [*events, _event("content_block_start", index=index, content_block=block)]

    def _delta_event(self, **delta: str) -> StreamEvent:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> list[StreamEvent]:
        """End the block that is open, if one is."""
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._blocks - 1)]


class MessageObject:
    """Writes an answer as one object."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        self._stamp = stamp
        self._repeated = request.include.repeat
        self._parser = AnswerParser(request, tokenizer)
        self._answer = ParsedAnswer()
        self._stopped = StopReason()

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """Keep the output; nothing is sent yet."""
        self._answer = ParsedAnswer.of(self._parser.read(choice, delta))
        self._stopped = StopReason.of(delta, calls=bool(self._answer.calls))
        return []

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The answer."""
        usage = usage_of(served[0], self._parser.reasoning_tokens)
        blocks = _blocks(self._answer)
        message = _message(self._stamp, blocks, self._stopped, usage)
        return [StreamEvent(json.dumps({**message, **self._repeated}))]


def _blocks(parsed: ParsedAnswer) -> list[JsonObject]:
    """The output as blocks: at least one."""
    thoughts = [_thinking(parsed.reasoning)] if parsed.reasoning else []
    texts = [_text(parsed.content)] if parsed.content or not parsed.calls else []
    return [*thoughts, *texts, *map(_call_block, parsed.calls)]


def _call_block(call: ParsedCall) -> JsonObject:
    """A call as a block; as text if its arguments nest more deeply than can be read."""
    try:
        return _tool_use(call.id, call.name, json.loads(call.arguments))
    except (ValueError, RecursionError):
        return _text(call.arguments)


def _event(kind: str, **fields: Any) -> StreamEvent:
    return StreamEvent(json.dumps({"type": kind, **fields}), kind)


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> AnswerWriter:
    """The writer of an answer, by the request's `stream`."""
    kind = MessageEvents if request.stream else MessageObject
    return kind(stamp, request, tokenizer)
