"""An answer as it comes: its events with tokens, the number of tokens, and its end.

An event has tokens if it has text. Other events may have tokens too, as some servers send
one for a token that is only part of a character; but not the event that opens a chat with
the role, nor the one that only has the finish reason. The number of tokens comes with
`usage`, in the last event; if a server sends none, events are counted.
"""

import json
from array import array
from typing import Any, Final

from minfer.effects.runs.load.request_record import ReplyError, RequestFailure, one_line

OK: Final = 200
STREAM: Final = "text/event-stream"
_DONE: Final = b"[DONE]"
_KEPT: Final = 2**16  # bytes of a failure's body
_LONGEST: Final = 2**24  # bytes of a line


class ReplyReader:
    """One answer, as it comes."""

    def __init__(self) -> None:
        self.status = 0
        self.events = array("d")  # monotonic times of events with tokens
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.has_usage = False
        self._body = bytearray()  # of an answer that is no stream
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []  # of the event that has not ended
        self._finished = False  # a finish reason or an end mark has come

    def begin(self, status: int, content_type: str) -> None:
        """Read the head. Raises ReplyError if it is not of a stream."""
        self.status = status
        if status == OK and content_type != STREAM:
            raise ReplyError("malformed", f"the answer is {content_type}, not a stream")

    def feed(self, part: bytes, now: float) -> None:
        """Read a part of the body, at a monotonic time. Raises ReplyError."""
        if self.status != OK:
            self._body += part[: max(0, _KEPT - len(self._body))]
            return
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LONGEST:
            raise ReplyError("malformed", f"a line of more than {_LONGEST:,} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removesuffix(b"\r").removeprefix(b" "))
            elif line in (b"", b"\r") and self._data:
                self._event(b"\n".join(self._data), now)
                self._data.clear()

    def failure(self) -> RequestFailure | None:
        """The failure of an answer whose body has ended, if any."""
        if self.status != OK:
            return RequestFailure(f"HTTP {self.status}", _message(bytes(self._body)))
        return (
            None if self._finished else RequestFailure("cut off", "the stream has no end")
        )

    def _event(self, data: bytes, now: float) -> None:
        """Read an event of the stream. Raises ReplyError."""
        if data == _DONE:
            self._finished = True
            return
        event = _parse(data)
        if event.get("error"):
            raise ReplyError("error in the answer", _error(event))
        try:
            if event.get("usage"):
                self.prompt_tokens = int(event["usage"]["prompt_tokens"])
                self.output_tokens = int(event["usage"].get("completion_tokens") or 0)
                self.has_usage = True
            if event.get("choices"):
                choice = event["choices"][0]
                end = choice.get("finish_reason")
                if self._brings_tokens(choice, end):
                    self.events.append(now)
                self._finished = self._finished or bool(end)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise ReplyError("malformed", f"an event is {_shorten(data)}") from None

    def _brings_tokens(self, choice: dict[str, Any], end: object) -> bool:
        delta = choice.get("delta")
        if delta is None:
            return bool(choice["text"]) or not end or not self.events
        text = delta.get("content") or delta.get("reasoning_content")
        if text or delta.get("reasoning") or delta.get("tool_calls"):
            return True
        return not self.events if end else "role" not in delta


def _parse(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ReplyError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ReplyError("malformed", f"{_shorten(data)!r} is no JSON object")
    return found


def _shorten(data: bytes) -> str:
    return one_line(data[:200].decode("utf-8", "replace"))


def _message(body: bytes) -> str:
    """The message of a body that is an error."""
    try:
        return _error(_parse(body))
    except ReplyError:
        return one_line(body.decode("utf-8", "replace")) or "no message"


def _error(found: dict[str, Any]) -> str:
    """The message of an error, in OpenAI's format or others'."""
    error = found.get("error") or found
    message = error.get("message") if isinstance(error, dict) else error
    detail = message or found.get("detail")
    return one_line(detail if isinstance(detail, str) else json.dumps(found))
