"""Every answer has an id, whatever becomes of it."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.wire.request_ids import MAX_ID_CHARS, RequestIds
from tests.effects.served import Serving

PATHS = [
    "/health",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/nothing",
    "/v1/completions",
]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_one(bundled: Serving, path: str) -> None:
    first, second = (bundled.get(path).headers["x-request-id"] for _ in range(2))
    assert first != second
    assert first.startswith("req-")


@pytest.mark.parametrize("path", PATHS)
def test_the_clients_comes_back(bundled: Serving, path: str) -> None:
    headers = {"X-Request-Id": "mine, 7"}
    found = bundled.http.get(bundled.url + path, headers=headers)
    assert found.headers.get_list("x-request-id") == ["mine, 7"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_bears_its_own_unless_the_client_chose_one(
    bundled: Serving, stream: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    url = f"{bundled.url}/v1/completions"
    own = bundled.http.post(url, json=body)
    assert own.headers["x-request-id"].startswith("cmpl-")
    assert own.headers["x-request-id"] in own.text
    chosen = bundled.http.post(url, json=body, headers={"x-request-id": "abc"})
    assert chosen.headers.get_list("x-request-id") == ["abc"]
    assert "abc" not in chosen.text  # the engine's ids are never a client's
    refused = bundled.http.post(url, json={}, headers={"x-request-id": "abc"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "abc")


def headers_of(given: bytes | None, kind: str = "http.response.start") -> list[Any]:
    """The ids on an answer without any of its own."""
    sent: list[Any] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": kind})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    headers = [] if given is None else [(b"x-request-id", given)]
    scope = {"type": "http", "headers": headers}
    asyncio.run(RequestIds(app)(scope, receive, send))
    return [
        value for name, value in sent[0].get("headers", ()) if name == b"x-request-id"
    ]


@pytest.mark.parametrize(
    "given",
    [b"", b"  ", b"a\nb", b"a\x00", "é".encode(), b"a" * (MAX_ID_CHARS + 1), None],
)
def test_what_is_not_sane_is_not_taken(given: bytes | None) -> None:
    (made,) = headers_of(given)
    assert made.startswith(b"req-")


@pytest.mark.parametrize("given", [b"a", b"a" * MAX_ID_CHARS, b" ~{}\"' "])
def test_what_is_sane_is_taken(given: bytes) -> None:
    assert headers_of(given) == [given.strip()]


def test_only_the_head_of_an_answer_bears_it() -> None:
    assert headers_of(b"a", "websocket.accept") == [b"a"]
    assert headers_of(b"a", "http.response.body") == []
