"""A third transport is one module and one row: here a WebSocket for each request."""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import pytest
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving import application
from minfer.effects.serving.application import Application
from minfer.effects.serving.endpoints import ROUTES
from minfer.effects.serving.wire.transport import Failure, Handler, StreamEvent, Watcher

# --- what would be a transport's module ------------------------------------------------


class Socket:
    """A WebSocket on which one request comes, and on which its events go back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send

    @property
    def chosen_id(self) -> str:
        return ""

    def announced_size(self, max_bytes: int) -> int:
        return max_bytes

    async def read(self, max_bytes: int, see: Watcher) -> bytes:
        assert (await self.receive())["type"] == "websocket.connect"
        await self.send({"type": "websocket.accept"})
        message = await self.receive()
        if message["type"] == "websocket.disconnect":
            raise ClientDisconnect
        data: bytes = message["text"].encode()
        assert len(data) <= max_bytes
        see(data)
        return data

    async def wait_for_disconnect(self) -> NoReturn:
        while (await self.receive())["type"] != "websocket.disconnect":
            pass
        raise ClientDisconnect

    async def refuse(self, failure: Failure) -> None:
        await self.fail(failure)

    def transport(
        self, *, stream: bool, name: str, ignored: Sequence[str] = ()
    ) -> "Socket":
        assert name
        assert not ignored
        assert stream
        return self

    async def write(self, events: Iterable[StreamEvent], *, last: bool) -> None:
        for event in events:
            await self.send({"type": "websocket.send", "text": event.data})
        if last:
            await self.send({"type": "websocket.close", "code": 1000})

    async def fail(self, failure: Failure) -> None:
        await self.send({"type": "websocket.send", "text": failure.event.data})
        await self.send({"type": "websocket.close", "code": 1011})


class _Endpoint:
    def __init__(self, serve: Handler) -> None:
        self.serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await self.serve(Socket(scope, receive, send))


def socket_route(path: str, serve: Handler) -> BaseRoute:
    return WebSocketRoute(path, _Endpoint(serve))


# --- its row, and what it does ----------------------------------------------------------


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setattr(application, "ROUTES", (*ROUTES, socket_route))
    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        yield Application(llm, ["dry"], api_key="key")


def talk(
    app: Application,
    path: str,
    body: dict[str, Any] | None,
    key: str = "key",
    leave_after: int = 10**6,
) -> list[Any]:
    """All messages of one connection; the client leaves after `leave_after` of them."""
    header = (b"authorization", f"Bearer {key}".encode())
    scope: Scope = {"type": "websocket", "path": path, "headers": [header]}
    inbox: list[Any] = [{"type": "websocket.connect"}]
    if body is not None:
        inbox.append({"type": "websocket.receive", "text": json.dumps(body)})
    sent: list[Any] = []

    async def conversation() -> None:
        left = asyncio.Event()

        async def receive() -> Any:
            if not inbox and body is not None:
                await left.wait()
            return inbox.pop(0) if inbox else {"type": "websocket.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > leave_after:
                left.set()

        await app({**scope, "root_path": "", "query_string": b""}, receive, send)

    asyncio.run(conversation())
    return sent


CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 9}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 9}),
    ],
)
def test_every_endpoint_is_reached_over_it(
    app: Application, path: str, body: dict[str, Any]
) -> None:
    accepted, *frames, closed = talk(app, path, body)
    assert accepted["type"] == "websocket.accept"
    assert closed == {"type": "websocket.close", "code": 1000}
    *emitted, last = [frame["text"] for frame in frames]
    assert last == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in emitted]
    assert choices[-1]["finish_reason"] == "length"
    deltas = [choice.get("delta", choice) for choice in choices]
    text = "".join(delta.get("text", delta.get("content", "")) for delta in deltas)
    assert len(text) > 9


def test_failures_are_sent_over_it(app: Application) -> None:
    other_model = {"prompt": "x", "model": "other"}
    for body, code in (({"prompt": 5}, None), (other_model, "model_not_found")):
        _, frame, closed = talk(app, "/v1/completions", body)
        assert json.loads(frame["text"])["error"]["code"] == code
        assert closed == {"type": "websocket.close", "code": 1011}
    long = {"prompt": "x " * 10**4, "stream": True}
    _, frame, closed = talk(app, "/v1/completions", long)  # of the model, in a thread
    assert json.loads(frame["text"])["error"]["code"] == "context_length_exceeded"
    assert closed["code"] == 1011


def test_a_disconnect_cancels_the_request(app: Application) -> None:
    (accepted,) = talk(app, "/v1/completions", None)
    assert accepted["type"] == "websocket.accept"
    long = {"prompt": "x", "stream": True, "max_tokens": 1900, "ignore_eos": True}
    sent = talk(app, "/v1/completions", long, leave_after=3)
    assert sent[-1]["type"] == "websocket.send"
    assert not any("[DONE]" in message.get("text", "") for message in sent)


def test_the_key_is_required_here_too(app: Application) -> None:
    first = talk(app, "/v1/completions", CHAT, key="wrong")[0]
    assert (first["type"], first["status"]) == ("websocket.http.response.start", 401)
