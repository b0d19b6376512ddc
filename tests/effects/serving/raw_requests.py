"""Requests sent by hand, byte for byte, where a client library would not send them so."""

import asyncio
import json
import socket
from typing import Any

from starlette.types import ASGIApp

from tests.effects.served import Serving

SLOW: dict[str, Any] = {
    "executor": "oracle",
    "num_gpu_blocks_override": 4000,
    "step": 0.002,
}


NEIGHBOUR = {
    "prompt": "neighbour",
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
}


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def asking(served: Serving, data: bytes, *, sent: int | None = None) -> socket.socket:
    """A connection on which a completion was asked for; with `sent`, only the first
    `sent` bytes of its body were.
    """
    link = socket.create_connection(("127.0.0.1", served.port))
    link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data[:sent])
    return link


def raw(
    served: Serving,
    data: bytes,
    *,
    path: str = "completions",
    length: int | None = None,
    media: str = "application/json",
    headers: str = "",
) -> tuple[int, Any]:
    """Send a body as it is; returns status and parsed answer."""
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\n{headers}"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return exchange(served, head.encode() + data)


def exchange(served: Serving, data: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(data)
        status, body = receive_response(link)
    return status, json.loads(body)


def receive_response(link: socket.socket) -> tuple[int, bytes]:
    """The status and the body of the next response, which has a Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += link.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < size:
        body += link.recv(65536)
    return int(head.split()[1]), body


async def asgi(
    app: ASGIApp, path: str, body: bytes, media: str = "application/json"
) -> list[Any]:
    """The messages with which an application answers a POST; the client stays."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", media.encode())],
        "query_string": b"",
        "root_path": "",
    }
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent
