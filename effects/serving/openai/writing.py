"""Writers of OpenAI's endpoints: a stream of chunks, or one object with all choices.

    chunk     {id, object, created, model, choices: [one]}, ended by [DONE]
    object    {id, object, created, model, choices: [all], usage}

An endpoint adds the format of a choice.
"""

import json
from collections.abc import Sequence
from typing import Final

from minfer.effects.serving.openai.usage import timing_of, usage_of
from minfer.effects.serving.protocol import Include, PromptUsage
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Event

JsonObject = dict[str, object]
DONE: Final = Event("[DONE]", mark=True)  # the last of every stream


def _head(stamp: Stamp, kind: str) -> JsonObject:
    return {
        "id": stamp.id,
        "object": kind,
        "created": stamp.created,
        "model": stamp.model,
    }


class ChunkWriter:
    """Writes a stream; each choice's outputs are chunks of their own."""

    def __init__(self, stamp: Stamp, kind: str, include: Include) -> None:
        self._include = include
        self._head = _head(stamp, kind)
        if include.usage:  # then every chunk has the field, and the last one its value
            self._head["usage"] = None

    def chunk(self, choice: JsonObject) -> Event:
        """The event for the new output of one choice."""
        return Event(json.dumps({**self._head, "choices": [choice]}))

    def end(self, served: Sequence[PromptUsage]) -> list[Event]:
        """The usage and the like, if requested, then the mark of the end."""
        about: JsonObject = {"usage": usage_of(served)} if self._include.usage else {}
        if self._include.timing:
            about["timing"] = [timing_of(one) for one in served]
        if not about:
            return [DONE]
        return [Event(json.dumps({**self._head, "choices": [], **about})), DONE]


class ObjectWriter:
    """Keeps choices, and writes them as one object at the end."""

    def __init__(self, stamp: Stamp, kind: str, include: Include) -> None:
        self._include = include
        self._head = _head(stamp, kind)
        self._choices: dict[int, JsonObject] = {}

    def keep(self, choice: int, choice_json: JsonObject) -> list[Event]:
        """Keep a choice, which is complete; nothing is sent yet."""
        self._choices[choice] = choice_json
        return []

    def end(self, served: Sequence[PromptUsage]) -> list[Event]:
        """The answer."""
        choices = [self._choices[i] for i in sorted(self._choices)]
        answer = {**self._head, "choices": choices, "usage": usage_of(served)}
        if self._include.timing:
            answer["timing"] = [timing_of(one) for one in served]
        return [Event(json.dumps(answer))]
