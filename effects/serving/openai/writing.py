"""Writers of OpenAI's endpoints: a stream of chunks, or one object with all choices.

    chunk     {id, object, created, model, choices: [one]}, ended by [DONE]
    object    {id, object, created, model, choices: [all], usage}

An endpoint adds the format of a choice.
"""

import json
from collections.abc import Sequence
from typing import Final

from minfer.effects.serving.openai.usage import timing_of, usage_of, usage_so_far
from minfer.effects.serving.protocol import GenerationRequest, PromptUsage
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput

JsonObject = dict[str, object]
DONE: Final = StreamEvent("[DONE]", mark=True)  # the last of every stream


def _head(stamp: Stamp, kind: str) -> JsonObject:
    return {
        "id": stamp.id,
        "object": kind,
        "created": stamp.created,
        "model": stamp.model,
    }


class ChunkWriter:
    """Writes a stream; each choice's outputs are chunks of their own."""

    def __init__(self, stamp: Stamp, kind: str, request: GenerationRequest) -> None:
        include = request.include
        self._include = include
        self._head = _head(stamp, kind)
        self._prompt_tokens = sum(len(prompt.ids) for prompt in request.prompts)
        self._output_tokens = 0  # written by now
        if include.usage:  # then every chunk has the field, and the last one its value
            self._head["usage"] = None

    def count(self, delta: CompletionOutput) -> None:
        """Count the tokens of an output, before its chunks."""
        self._output_tokens += len(delta.token_ids)

    def chunk(self, choice: JsonObject, **fields: object) -> StreamEvent:
        """The event for the new output of one choice, with more fields."""
        if self._include.usage_in_chunks:
            fields["usage"] = usage_so_far(self._prompt_tokens, self._output_tokens)
        return StreamEvent(json.dumps({**self._head, **fields, "choices": [choice]}))

    def reasoning_tokens(self) -> int | None:
        """The reasoning tokens of the answer; None: not known."""
        return None

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The usage and the like, if requested, then the mark of the end."""
        extra_fields: JsonObject = {}
        if self._include.usage:
            extra_fields["usage"] = usage_of(served, self.reasoning_tokens())
        if self._include.timing:
            extra_fields["timing"] = [timing_of(prompt_usage) for prompt_usage in served]
        if not extra_fields:
            return [DONE]
        return [
            StreamEvent(json.dumps({**self._head, "choices": [], **extra_fields})),
            DONE,
        ]


class ObjectWriter:
    """Keeps choices, and writes them as one object at the end."""

    def __init__(self, stamp: Stamp, kind: str, request: GenerationRequest) -> None:
        self._include = request.include
        self._head = _head(stamp, kind)
        self._choices: dict[int, JsonObject] = {}

    def keep(self, choice: int, choice_json: JsonObject) -> list[StreamEvent]:
        """Keep a choice, which is complete; nothing is sent yet."""
        self._choices[choice] = choice_json
        return []

    def reasoning_tokens(self) -> int | None:
        """The reasoning tokens of the answer; None: not known."""
        return None

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The answer."""
        choices = [self._choices[i] for i in sorted(self._choices)]
        usage = usage_of(served, self.reasoning_tokens())
        answer = {**self._head, "choices": choices, "usage": usage}
        if self._include.timing:
            answer["timing"] = [timing_of(prompt_usage) for prompt_usage in served]
        return [StreamEvent(json.dumps(answer))]
