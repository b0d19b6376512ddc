"""The access log: one line for each request, once its answer has ended.

    request ---> AccessLog ---> application
                    |  status, time, ids
                 Lines ---> standard output        in a thread of its own, which looks up
                                                   tokens and makes the line

Prompts and outputs are never in it. Probes of health and metrics are not logged.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from attrs import evolve, frozen
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minfer.effects.serving.access.authentication import key_name
from minfer.effects.serving.observability.records import JsonObject
from minfer.effects.serving.observability.stdout_lines import LineWriter
from minfer.effects.serving.wire.request_ids import ID_HEADER

LOG_FORMATS: Final = ("json", "text", "off")
UNLOGGED_PATHS: Final = frozenset({"/health", "/healthz", "/ready", "/metrics"})
_CLIENT_CLOSED: Final = 499  # the client left before there was an answer
_MAX_PATH_CHARS: Final = 512  # of a path
_SWITCHING_PROTOCOLS: Final = 101  # it is a WebSocket from here on
_PLACEMENT_FIELDS: Final = ("replica", "machine", "why")  # of an answer's record
# Messages that begin an answer, with the status if the message has none.
_FIRST_MESSAGES: Final[Mapping[str, int]] = {
    "http.response.start": 200,
    "websocket.accept": _SWITCHING_PROTOCOLS,
    "websocket.http.response.start": 403,
    "websocket.close": 403,
}

# The record of an answer, by its id and the name of its client's key.
FindRecord = Callable[[str, str], JsonObject | None]


@frozen(kw_only=True)
class AccessEntry:
    """A request, as it is logged."""

    arrived_at: float  # in seconds since 1970
    method: str
    path: str
    status: int
    ms: float  # until the last of its answer was handed over
    request_id: str
    key: str  # the name of its client's key, or nothing
    process: str
    model: str = ""  # as it was requested: the name of the model, or of an adapter
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    replica: str = ""  # the last one, of several engines, of its first prompt
    machine: str = ""  # where that was then
    why: str = ""  # it was sent there

    def to_json(self) -> str:
        """The entry in JSON, for programs."""
        return json.dumps(
            {
                "time": _date(self.arrived_at),
                "process": self.process,
                "method": self.method,
                "path": self.path,
                "status": self.status,
                "ms": self.ms,
                "request_id": self.request_id,
                "key": self.key or None,
                "model": self.model or None,
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
                **self._placed(),
            }
        )

    def _placed(self) -> dict[str, str]:
        if not self.replica:
            return {}
        return {"replica": self.replica, "machine": self.machine, "why": self.why}

    def to_text(self) -> str:
        """The entry as text, for people."""
        words = [_date(self.arrived_at), f"{self.process}:", self.method, self.path]
        words += [str(self.status), f"{self.ms:.1f} ms", f"id={_word(self.request_id)}"]
        words += [f"key={_word(self.key)}"] if self.key else []
        words += [f"model={_word(self.model)}"] if self.model else []
        if self.prompt_tokens is not None:
            words.append(f"tokens={self.prompt_tokens}+{self.output_tokens}")
        words += [f"{name}={_word(text)}" for name, text in self._placed().items()]
        return " ".join(words)


class AccessLog:
    """Middleware that logs: the outermost."""

    def __init__(
        self, app: ASGIApp, lines: LineWriter, form: str, process: str, record: FindRecord
    ) -> None:
        self._app = app
        self._lines = lines
        self._make = AccessEntry.to_json if form == "json" else AccessEntry.to_text
        self._process = process
        self._find_record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and log it."""
        if scope["type"] == "lifespan" or scope["path"] in UNLOGGED_PATHS:
            await self._app(scope, receive, send)
            return
        head: list[Message] = []

        async def send_noting_head(message: Message) -> None:
            if not head and message["type"] in _FIRST_MESSAGES:
                head.append(message)
            await send(message)

        arrived_at, started = time.time(), time.perf_counter()
        default_status = 500
        try:
            await self._app(scope, receive, send_noting_head)
            default_status = _CLIENT_CLOSED
        finally:
            ms = round(1000 * (time.perf_counter() - started), 3)
            self._log(
                scope, head[0] if head else {"status": default_status}, arrived_at, ms
            )

    def _log(self, scope: Scope, head: Message, arrived_at: float, ms: float) -> None:
        request_id = dict(head.get("headers") or ()).get(ID_HEADER, b"").decode("latin-1")
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        entry = AccessEntry(
            arrived_at=arrived_at,
            method=scope.get("method", "WEBSOCKET"),
            path=raw_path[:_MAX_PATH_CHARS].decode("ascii", "backslashreplace"),
            status=head.get("status", _FIRST_MESSAGES.get(head.get("type", ""), 0)),
            ms=ms,
            request_id=request_id,
            key=key_name(scope),
            process=self._process,
        )
        self._lines.put(lambda: self._make(self._with_tokens(entry)))

    def _with_tokens(self, entry: AccessEntry) -> AccessEntry:
        """The entry with the tokens of its answer, if a record has them."""
        record = self._find_record(entry.request_id, entry.key)
        if record is None or record["endpoint"] != entry.path:
            return entry
        prompts: Any = record["prompts"]
        placements = [
            prompt["replicas"][-1] for prompt in prompts if "replicas" in prompt
        ]
        return evolve(
            entry,
            model=str(record["model"]),
            prompt_tokens=sum(prompt["prompt_tokens"] for prompt in prompts),
            output_tokens=sum(prompt["output_tokens"] for prompt in prompts),
            **(
                {name: placements[0][name] for name in _PLACEMENT_FIELDS}
                if placements
                else {}
            ),
        )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _word(text: str) -> str:
    """A text that a client chose, as one word."""
    return json.dumps(text) if set(text) & set(' "\\') else text
