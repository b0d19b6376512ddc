"""The first line of requests, and how their bodies are framed, on a real socket."""

import asyncio
import json
import socket
from typing import Any

import pytest

from minfer.effects.serving.application import refusal
from minfer.effects.serving.wire.request_targets import NormalizeTarget
from tests.effects.served import Serving
from tests.effects.serving.raw_requests import receive_response

BODY = b'{"prompt": "x", "max_tokens": 1}'
FRAMED = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(BODY)


def sent(served: Serving, data: bytes) -> tuple[int, bytes, bool]:
    """The status and the body of an answer, and whether its connection was closed."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(data)
        status, body = receive_response(link)
        link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            closed = not link.recv(1)
        except ConnectionError:
            closed = True
    return status, body, closed


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/v1/models", 200),
        ("HTTP://x:8000/v1/models?a=b", 200),
        ("https://user@x/v1/models", 200),
        ("http://x", 200),
        ("http://x/v1/%6dodels", 200),
        ("http://x/nothing", 404),
        ("/http://x/v1/models", 404),
    ],
)
def test_absolute_targets_are_paths(bundled: Serving, target: str, status: int) -> None:
    answer = sent(bundled, f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert (answer[0], answer[2]) == (status, False)
    if "odels" in target and status == 200:
        assert json.loads(answer[1])["object"] == "list"


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://a.example:80/v1/x%2Fy", "/v1/x/y", b"a.example:80"),
        (b"http://me:pw@a.example", "/", b"a.example"),
        (b"/v1/x", "/v1/x", b"b.example"),
    ],
)
def test_the_host_of_an_absolute_target_counts(
    target: bytes, path: str, host: bytes
) -> None:
    scopes: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        scopes.append(scope)

    headers = [(b"host", b"b.example"), (b"accept", b"*")]
    scope = {"type": "http", "raw_path": target, "path": target.decode()}
    asyncio.run(NormalizeTarget(app, refusal)({**scope, "headers": headers}, None, None))  # type: ignore[arg-type]  # neither is used
    assert (scopes[0]["path"], dict(scopes[0]["headers"])[b"host"]) == (path, host)


def test_two_framings_are_refused_and_close(bundled: Serving) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + FRAMED
    status, body, closed = sent(bundled, head + chunked % (len(BODY), BODY))
    assert (status, closed) == (400, True)
    assert "Transfer-Encoding" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("version", ["9.9", "2.0", "0.9", "3.0"])
def test_other_versions_are_refused_and_close(bundled: Serving, version: str) -> None:
    answer = sent(bundled, f"GET /v1/models HTTP/{version}\r\nhost: x\r\n\r\n".encode())
    assert (answer[0], answer[2]) == (505, True)
    assert f"HTTP/{version}" in json.loads(answer[1])["error"]["message"]


def test_versions_of_http_1_are_served(bundled: Serving) -> None:
    for version in ("1.0", "1.1"):
        head = f"GET /v1/models HTTP/{version}\r\nhost: x\r\n\r\n"
        assert sent(bundled, head.encode())[0] == 200
