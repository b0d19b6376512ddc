"""Answers over HTTP: one head, parts, one end, and failures before and after the head."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from minfer.effects.serving.wire.http import HttpTransport
from minfer.effects.serving.wire.plain_body import PlainBody
from minfer.effects.serving.wire.sse import EventStream
from minfer.effects.serving.wire.transport import Failure, StreamEvent

BUSY = Failure(503, StreamEvent('{"error":"é"}'), retry_after=1)
Script = Callable[[HttpTransport], Coroutine[Any, Any, None]]


def sent_by(
    kind: type[HttpTransport], script: Script, ignored: Sequence[str] = ()
) -> list[Any]:
    """What a script sends on a transport, whose answer is called `a-name`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing was to be received")

    asyncio.run(script(kind({"type": "http"}, receive, send, "a-name", ignored)))
    return sent


@pytest.mark.parametrize(
    ("kind", "media", "body"),
    [
        (PlainBody, b"application/json", b"{}"),
        (EventStream, b"text/event-stream", b"data: {}\n\n"),
    ],
)
def test_the_head_goes_out_once_and_the_last_part_ends_it(
    kind: type[HttpTransport], media: bytes, body: bytes
) -> None:
    async def twice(transport: HttpTransport) -> None:
        await transport.write([StreamEvent("{}")], last=False)
        await transport.write([StreamEvent("{}")], last=True)

    unheld = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    head = [
        (b"content-type", media),
        *(unheld if kind is EventStream else []),
        (b"x-request-id", b"a-name"),
    ]
    assert sent_by(kind, twice) == [
        {"type": "http.response.start", "status": 200, "headers": head},
        {"type": "http.response.body", "body": body, "more_body": True},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]


@pytest.mark.parametrize("kind", [PlainBody, EventStream])
def test_a_failure_before_anything_is_a_response(kind: type[HttpTransport]) -> None:
    start, body = sent_by(kind, lambda transport: transport.fail(BUSY))
    assert start["status"] == 503
    assert dict(start["headers"]) == {
        b"retry-after": b"1",
        b"x-request-id": b"a-name",
        b"content-length": b"14",
        b"content-type": b"application/json",
    }
    assert body["body"] == '{"error":"é"}'.encode()


@pytest.mark.parametrize("kind", [PlainBody, EventStream])
def test_an_answer_and_a_failure_name_ignored_fields(kind: type[HttpTransport]) -> None:
    async def answers(transport: HttpTransport) -> None:
        await transport.write([StreamEvent("{}")], last=True)

    for script in (answers, lambda transport: transport.fail(BUSY)):
        start, _ = sent_by(kind, script, ("store", "a_hint"))
        assert dict(start["headers"])[b"x-minfer-ignored"] == b"store, a_hint"


def test_a_failure_after_the_head_is_the_last_part() -> None:
    async def fails(transport: HttpTransport) -> None:
        await transport.write([StreamEvent("{}")], last=False)
        await transport.fail(BUSY)

    last = sent_by(EventStream, fails)[-1]
    body = 'data: {"error":"é"}\n\n'.encode()
    assert last == {"type": "http.response.body", "body": body, "more_body": False}
