"""Calls of an ASGI application without an HTTP connection."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.types import ASGIApp, Message, Scope

# The parts of a scope that can be sent to another process: plain values.
_HEAD: Final = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)


def head_of(scope: Scope) -> dict[str, object]:
    """The parts of a request's scope that another process needs. The paths are without
    the prefix at which the application is mounted (`root_path`).
    """
    head = {name: scope[name] for name in _HEAD if name in scope}
    if prefix := scope.get("root_path", ""):
        head["path"] = scope["path"].removeprefix(prefix) or "/"
        head["raw_path"] = scope["raw_path"].removeprefix(prefix.encode()) or b"/"
    return head


def post_head(path: str, size: int, api_key: str = "") -> dict[str, object]:
    """The scope of a POST that did not come over HTTP, with a JSON body of `size` bytes;
    an empty `api_key` sends none.
    """
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % size),
    ]
    if api_key:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }


async def answers(
    app: ASGIApp, head: Scope, body: bytes, pause: float = 0.0
) -> AsyncGenerator[list[Message]]:
    """Call an application with a request; yields its ASGI messages in batches: all that
    it has sent since the batch before. Batches are at least `pause` seconds apart, except
    the last. Raises what the application raises. Closing this generator cancels the
    request.
    """
    sent: list[Message] = []
    new = asyncio.Event()
    unread = [body]

    async def receive() -> Message:
        if not unread:
            await asyncio.Future()  # it is cancelled when the client leaves
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)
        new.set()

    task = asyncio.ensure_future(app(head, receive, send))
    task.add_done_callback(lambda _: new.set())
    try:
        ended = False
        while not ended:
            await new.wait()
            new.clear()
            ended = task.done()
            if batch := [*sent]:
                sent.clear()
                yield batch
                if not ended and pause:
                    await asyncio.wait((task,), timeout=pause)
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
