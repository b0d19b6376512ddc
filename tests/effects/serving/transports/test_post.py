"""A POST: its body is taken up to a limit, and what is larger does no harm."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire import post
from minfer.effects.serving.wire.post import Post
from minfer.effects.serving.wire.transport import ignore_part
from tests.effects.served import Serving, events
from tests.effects.serving.raw_requests import HEAD, NEIGHBOUR, exchange


async def come(*chunks: bytes, **headers: str) -> bytes:
    """What is read of a body that comes in these parts, of which 10 bytes are allowed."""
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks)}
        for i, chunk in enumerate(chunks, 1)
    ]
    named = {"content_type": "application/json", **headers}.items()
    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in named]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError("reading sends nothing")

    return await Post({"type": "http", "headers": raw}, receive, send).read(
        10, ignore_part
    )


def test_a_body_comes_in_parts() -> None:
    assert asyncio.run(come(b"12345", b"", b"67890")) == b"1234567890"
    assert asyncio.run(come(b"{}", content_type="Application/JSON; charset=x")) == b"{}"
    assert asyncio.run(come(b"")) == b""


@pytest.mark.parametrize(
    ("chunks", "headers", "status", "words"),
    [
        ([b"{}"], {"content_type": "text/plain"}, 415, "application/json"),
        ([b"{}"], {"content_type": ""}, 415, "application/json"),
        ([b"12345", b"678901"], {}, 413, "more than 10 bytes"),
        ([], {"content_length": "11"}, 413, "more than 10 bytes"),  # nothing is awaited
    ],
)
def test_a_body_that_is_not_taken(
    chunks: list[bytes], headers: dict[str, str], status: int, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        asyncio.run(come(*chunks, **headers))
    assert caught.value.status == status


def test_a_body_that_comes_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "MIN_BYTES_PER_SECOND", 100)  # bytes a second

    async def dripped(pause: float) -> bytes:
        left = 9

        async def receive() -> Any:
            nonlocal left
            left -= 1
            await asyncio.sleep(pause)
            return {"type": "http.request", "body": b"x", "more_body": left > 0}

        async def send(_: Any) -> None:
            raise AssertionError("reading sends nothing")

        head = [(b"content-type", b"application/json")]
        return await Post({"type": "http", "headers": head}, receive, send).read(
            10, ignore_part
        )

    assert asyncio.run(dripped(0.001)) == b"x" * 9
    monkeypatch.setattr(post, "MAX_LAG_SECONDS", 0.05)
    with pytest.raises(ApiError, match="less than 100 bytes a second") as caught:
        asyncio.run(dripped(0.02))
    assert caught.value.status == 408


def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientDisconnect):
        asyncio.run(come())


@pytest.mark.long
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_megabytes(slow: Serving, quiet: list[str], chunked: bool) -> None:
    size = 100_000_000
    piece = b"a" * 1_000_000
    if chunked:
        chunks = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
        chunks += [b"%x\r\n%b\r\n" % (len(piece), piece)] * 100 + [b"0\r\n\r\n"]
    else:
        chunks = [HEAD + b"Content-Length: %d\r\n\r\n" % size, *[piece] * 100]
    with slow.http.stream("POST", f"{slow.url}/v1/completions", json=NEIGHBOUR) as beside:
        stream = events(beside.iter_lines())
        texts = [next(stream)["choices"][0]["text"]]
        status, reply = exchange(slow, b"".join(chunks))
        texts += [event["choices"][0]["text"] for event in stream]
    assert status == 413
    assert "more than 4194304 bytes" in reply["error"]["message"]
    assert "".join(texts) == "".join(quiet)
