"""An answer becomes a record: which events bring tokens, how many, and how it ended.

An event brings tokens if it has text. Events without any do too, as some servers send one
for a token that is only part of a character; but not the one that opens a chat with the
role, nor the one that only says why the text ended. How many tokens there were is told by
`usage`: in the last event, or, where a server sends it in each, event for event.
"""

import json
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from minfer.effects.runs.load.http import HttpError
from minfer.effects.runs.load.record import Failure, one_line
from minfer.effects.runs.load.sse import EventReader

OK: Final = 200
STREAM: Final = "text/event-stream"
_DONE: Final = b"[DONE]"
_KEPT: Final = 2**16  # bytes of a failure's body


class Reply:
    """One answer, as it comes."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._reader = EventReader()
        self.whole = bytearray()  # a body that is no stream
        self._finished = False  # a reason or a mark of the end has come
        self.status = 0
        self.events = array("d")  # monotonic times of events with tokens
        self.totals = array("q")  # output tokens told so far, at each of these
        self.ended = 0.0  # when the last text came
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.told = False  # usage was

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head has come. Raises HttpError if it is no stream where one was asked
        for.
        """
        self.status = status
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status != OK:
            self._stream = False
        elif self._stream and kind != STREAM:
            raise HttpError(
                "malformed", one_line(f"the answer is {kind or 'of no type'}, no stream")
            )

    def body(self, part: bytes, now: float) -> None:
        """A part of the body has come. Raises HttpError."""
        if not self._stream:
            if self.status == OK or len(self.whole) < _KEPT:
                self.whole += part
            self.ended = now
            return
        for data in self._reader.feed(part):
            if data == _DONE:
                self._finished = True
            else:
                self._event(_parsed(data), now)

    def failure(self) -> Failure | None:
        """What is wrong with an answer whose body has ended. Raises HttpError."""
        if self.status != OK:
            return Failure(f"HTTP {self.status}", _message(bytes(self.whole)))
        if not self._stream:
            told = _parsed(bytes(self.whole))
            _check_error(told)
            self._usage(told.get("usage"))
            if not told.get("choices"):
                return Failure("malformed", "the answer has no choices")
            return None
        return None if self._finished else Failure("cut off", "the stream has no end")

    def told_tokens(self) -> list[int]:
        """Tokens of each event, or nothing if the server did not say."""
        if 0 in self.totals:
            return []
        return [now - before for before, now in pairwise((0, *self.totals))]

    def _event(self, told: dict[str, Any], now: float) -> None:
        """An event of the stream. Raises HttpError."""
        _check_error(told)
        usage, choices = told.get("usage"), told.get("choices")
        if usage:
            self._usage(usage)
        if not choices:
            return
        try:
            choice = choices[0]
            end = choice.get("finish_reason")
            if self._brings(choice, end):
                self.events.append(now)
                self.totals.append(self.output_tokens if usage else 0)
                self.ended = now
        except (AttributeError, LookupError, TypeError):
            shown = one_line(json.dumps(told))
            raise HttpError("malformed", f"an event is {shown}") from None
        self._finished = self._finished or bool(end)

    def _brings(self, choice: dict[str, Any], end: object) -> bool:
        """Whether a choice of an event brings tokens."""
        delta = choice.get("delta")
        if delta is None:
            return bool(choice["text"]) or not end or not self.events
        said = delta.get("content") or delta.get("reasoning_content")
        if said or delta.get("reasoning") or delta.get("tool_calls"):
            return True
        return not self.events if end else "role" not in delta

    def _usage(self, usage: Any) -> None:
        """Take in what the server says of tokens. Raises HttpError."""
        if usage is None:
            return
        try:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage.get("completion_tokens") or 0)
        except (AttributeError, LookupError, TypeError, ValueError):
            shown = one_line(json.dumps(usage))
            raise HttpError("malformed", f"usage is {shown}") from None
        self.told = True


def _parsed(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises HttpError."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        shown = one_line(data[:200].decode("utf-8", "replace"))
        raise HttpError("malformed", f"{shown!r} is no JSON object")
    return told


def _check_error(told: dict[str, Any]) -> None:
    """Raise HttpError for an answer that is an error."""
    if told.get("error"):
        raise HttpError("error in the answer", _said(told))


def _message(body: bytes) -> str:
    """What a body says that is an error."""
    try:
        return _said(_parsed(body))
    except HttpError:
        return one_line(body.decode("utf-8", "replace")) or "without a word"


def _said(told: dict[str, Any]) -> str:
    """The message of an error, in OpenAI's shape or others'."""
    error = told.get("error") or told
    message = error.get("message") if isinstance(error, dict) else error
    detail = message or told.get("detail")
    return one_line(detail if isinstance(detail, str) else json.dumps(told))
