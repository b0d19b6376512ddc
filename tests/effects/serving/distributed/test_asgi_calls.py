"""Requests to an application of this process."""

import asyncio
import contextlib
from typing import Any

import pytest

from minfer.effects.serving.distributed.asgi_calls import answers, head_of, post_head


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, in two parts of which the second takes a moment."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(0.001)
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def check_messages() -> None:
    batches = [one async for one in answers(echo, post_head("/v1/x", 2), b"{}")]
    assert [len(one) for one in batches] == [2, 1]  # all that there are, at once
    bodies = [one.get("body") for batch in batches for one in batch]
    assert bodies == [None, b"{}", b"/v1/x"]
    head = post_head("/v1/x", 2)
    async with asyncio.timeout(10):  # the pause ends with the answer
        assert [batch async for batch in answers(echo, head, b"{}", 60.0)] == batches


def test_messages_come_as_they_are_sent() -> None:
    asyncio.run(check_messages())


async def check_cancelled() -> None:
    ended = []

    async def serve(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await receive()  # a client that is there says nothing
        finally:
            ended.append(True)

    calls = answers(serve, post_head("/v1/x", 0), b"")
    async with contextlib.aclosing(calls) as batches:
        await anext(batches)
        assert not ended
    assert ended == [True]


def test_who_stops_reading_cancels_it() -> None:
    asyncio.run(check_cancelled())


async def check_error() -> None:
    async def fail(*_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        [one async for one in answers(fail, post_head("/v1/x", 0), b"")]


def test_its_errors_are_raised() -> None:
    asyncio.run(check_error())


def test_a_prefix_of_the_application_is_no_part_of_the_path() -> None:
    scope = {**post_head("/llm/v1/models", 0), "root_path": "/llm", "app": object()}
    head = head_of(scope)
    assert (head["path"], head["raw_path"]) == ("/v1/models", b"/v1/models")
    assert "app" not in head
    assert head_of({**scope, "path": "/llm", "raw_path": b"/llm"})["path"] == "/"
