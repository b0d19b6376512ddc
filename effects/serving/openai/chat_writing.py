"""Writers of a chat's answer: as chunks, or as one object.

Chunks hold a delta: OpenAI's SDK concatenates the texts of equal fields, and of calls
with equal `index`; so a call's id and name come once, then fragments of its arguments.
OpenAI's API has no field for reasoning: other servers call it `reasoning_content`, or
`reasoning`, and clients read one of them.
"""

from minfer.effects.serving.openai.logprob_formats import (
    chat_logprobs,
    format_prompt_logprobs,
)
from minfer.effects.serving.openai.writing import ChunkWriter, JsonObject, ObjectWriter
from minfer.effects.serving.protocol import AnswerWriter, GenerationRequest, Include
from minfer.effects.serving.request_parsing.answer_parsing import (
    AnswerParser,
    ParsedAnswer,
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


class ChatChunks(ChunkWriter):
    """A streamed answer: the role, then deltas, then the finish reason."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "chat.completion.chunk", request)
        self._prompt = [*request.prompts[0].ids]
        self._tokenizer = tokenizer
        self._parser = AnswerParser(request, tokenizer)
        self._started: set[int] = set()  # choices whose role was sent

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """The chunks for the new output of a choice."""
        events = []
        self.count(delta)
        if choice not in self._started:
            self._started.add(choice)
            events.append(self._first(choice))
        deltas = self._parser.read(choice, delta)
        payloads = [_delta_json(parsed, self._include) for parsed in deltas]
        extra_fields = self._extra_fields(delta)  # once, for all new tokens
        delta_jsons = [delta_json for delta_json in payloads if delta_json] or (
            [{"content": ""}] if extra_fields else []
        )
        for delta_json in delta_jsons:
            events.append(self._delta(choice, delta_json, extra_fields))
            extra_fields = {}
        if delta.finish_reason:
            end = _finish_reason(delta, calls=self._parser.calls(choice))
            events.append(self._delta(choice, {}, {"finish_reason": end}))
        return events

    def reasoning_tokens(self) -> int:
        """The reasoning tokens of the answer."""
        return self._parser.reasoning_tokens

    def _extra_fields(self, delta: CompletionOutput) -> JsonObject:
        """The requested fields of tokens besides their text."""
        extra_fields: JsonObject = {}
        if delta.logprobs:
            extra_fields["logprobs"] = _scores(delta, self._include, self._tokenizer)
        if self._include.token_ids and delta.token_ids:
            extra_fields["token_ids"] = [*delta.token_ids]
        return extra_fields

    def _first(self, choice: int) -> StreamEvent:
        """The first chunk of a choice."""
        delta: JsonObject = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": self._prompt} if self._include.token_ids else {}
        return self.chunk(_choice_json(choice, delta), **ids)

    def _delta(
        self, choice: int, delta: JsonObject, extra_fields: JsonObject
    ) -> StreamEvent:
        choice_json = _choice_json(choice, delta)
        choice_json.update(extra_fields)
        return self.chunk(choice_json)


class ChatObject(ObjectWriter):
    """An answer as one object."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "chat.completion", request)
        self._prompt = [*request.prompts[0].ids]
        self._tokenizer = tokenizer
        self._parser = AnswerParser(request, tokenizer)

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """Keep a choice, which is complete."""
        if self._include.prompt_logprobs is not None:
            self._head["prompt_logprobs"] = format_prompt_logprobs(delta, self._include)
        parsed = ParsedAnswer.of(self._parser.read(choice, delta))
        payload: JsonObject = {
            "index": choice,
            "logprobs": _scores(delta, self._include, self._tokenizer),
            "message": _message(parsed, reasoning=self._include.reasoning),
            "finish_reason": _finish_reason(delta, calls=bool(parsed.calls)),
        }
        if self._include.token_ids:
            payload["token_ids"] = [*delta.token_ids]
            self._head["prompt_token_ids"] = self._prompt
        return self.keep(choice, payload)

    def reasoning_tokens(self) -> int:
        """The reasoning tokens of the answer."""
        return self._parser.reasoning_tokens


def _choice_json(choice: int, delta: JsonObject) -> JsonObject:
    """A choice of a chunk."""
    return {"index": choice, "logprobs": None, "delta": delta, "finish_reason": None}


def _message(parsed: ParsedAnswer, *, reasoning: bool) -> JsonObject:
    """The output as a message: without content if there is none beside calls or
    reasoning; with the `reasoning`, if that is requested.
    """
    content = parsed.content or (None if parsed.calls or parsed.reasoning else "")
    payload: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if parsed.calls:
        payload["tool_calls"] = [
            _call(call.id, call.name, call.arguments) for call in parsed.calls
        ]
    if parsed.reasoning and reasoning:
        payload |= _reasoning(parsed.reasoning)
    return payload


def _delta_json(delta: Delta, include: Include) -> JsonObject:
    """A delta in OpenAI's format; empty if that has no field for it, or if it is not
    requested.
    """
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text) if include.reasoning else {}
        case CallStart(index, name_id, name):
            return {"tool_calls": [{"index": index, **_call(name_id, name, "")}]}
        case Arguments(index, text):
            call_delta = {"index": index, "function": {"arguments": text}}
            return {"tool_calls": [call_delta]}
        case CallEnd():
            return {}


def _call(name_id: str, name: str, arguments: str) -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": name_id, "type": "function", "function": function}


def _reasoning(text: str) -> JsonObject:
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(delta: CompletionOutput, *, calls: bool) -> str | None:
    """The finish reason of a choice: "tool_calls" if it stopped and has calls."""
    return (
        "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason
    )


def _scores(
    delta: CompletionOutput, include: Include, tokenizer: Tokenizer | None
) -> JsonObject | None:
    if not delta.logprobs:
        return None
    top, as_ids = include.top_logprobs, include.tokens_as_ids
    return chat_logprobs(delta.logprobs, top, tokenizer, as_ids=as_ids)


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> AnswerWriter:
    """The writer of an answer, by the request's `stream`."""
    kind = ChatChunks if request.stream else ChatObject
    return kind(stamp, request, tokenizer)
