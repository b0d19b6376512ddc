"""Every answer has an id, whatever becomes of it."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from minfer.effects.serving.wire.request_ids import MAX_ID_CHARS, RequestIds
from tests.effects.served import Serving

PATHS = ["/health", "/v1/nothing", "/v1/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_one(bundled: Serving, path: str) -> None:
    first, second = (bundled.get(path).headers["x-request-id"] for _ in range(2))
    assert first != second
    assert first.startswith("req-")


@pytest.mark.parametrize("path", PATHS)
def test_the_clients_comes_back(bundled: Serving, path: str) -> None:
    headers = {"X-Request-Id": "mine, 7"}
    response = bundled.http.get(bundled.url + path, headers=headers)
    assert response.headers.get_list("x-request-id") == ["mine, 7"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_bears_its_own_unless_the_client_chose_one(
    bundled: Serving, stream: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    url = f"{bundled.url}/v1/completions"
    answer = bundled.http.post(url, json=body)
    assert answer.headers["x-request-id"].startswith("cmpl-")
    assert answer.headers["x-request-id"] in answer.text
    chosen = bundled.http.post(url, json=body, headers={"x-request-id": "abc"})
    assert chosen.headers.get_list("x-request-id") == ["abc"]
    assert "abc" not in chosen.text  # the engine's ids are never a client's
    refused = bundled.http.post(url, json={}, headers={"x-request-id": "abc"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "abc")


def headers_of(chosen: bytes | None, kind: str = "http.response.start") -> list[Any]:
    """The ids on an answer without any of its own."""
    sent: list[Any] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": kind})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    headers = [] if chosen is None else [(b"x-request-id", chosen)]
    scope = {"type": "http", "headers": headers}
    asyncio.run(RequestIds(app)(scope, receive, send))
    return [
        value for name, value in sent[0].get("headers", ()) if name == b"x-request-id"
    ]


@pytest.mark.parametrize(
    "chosen",
    [b"", b"  ", b"a\nb", b"a\x00", "é".encode(), b"a" * (MAX_ID_CHARS + 1), None],
)
def test_what_is_not_sane_is_not_taken(chosen: bytes | None) -> None:
    (request_id,) = headers_of(chosen)
    assert request_id.startswith(b"req-")


@pytest.mark.parametrize("chosen", [b"a", b"a" * MAX_ID_CHARS, b" ~{}\"' "])
def test_what_is_sane_is_taken(chosen: bytes) -> None:
    assert headers_of(chosen) == [chosen.strip()]


def test_only_the_head_of_an_answer_bears_it() -> None:
    assert headers_of(b"a", "websocket.accept") == [b"a"]
    assert headers_of(b"a", "http.response.body") == []
