"""The ingress of Ray Serve over engines that are not there."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from attrs import define, field

pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from minfer.effects.serving.distributed.asgi_calls import answers, post_head
from minfer.effects.serving.distributed.front_application import FrontApplication
from minfer.effects.serving.distributed.serve_front import AnswerError, ServedFront

pytestmark = pytest.mark.long  # Ray takes a second to import
START = {"type": "http.response.start", "status": 200}
COMPLETIONS = "/v1/completions"


@define(eq=False)
class Handle:
    """A handle to engines, each call of which does the next of these."""

    calls: list[Callable[[], AsyncIterator[Any]]]
    asked: list[tuple[Any, ...]] = field(factory=list)
    cancelled: int = 0

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return Replies(self, self.calls.pop(0)())


@define(eq=False)
class Replies:
    handle: Handle
    each: AsyncIterator[Any]

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.each

    def cancel(self) -> None:
        self.handle.cancelled += 1


async def answered() -> AsyncIterator[Any]:
    yield "r1"
    yield [{**START, "headers": [(b"x-request-id", b"mine"), (b"a", b"b")]}]
    yield [{"type": "http.response.body", "body": b'{"id": "cmpl-1"}'}]


async def gone() -> AsyncIterator[Any]:
    yield "r0"
    raise RayActorError


async def cut() -> AsyncIterator[Any]:
    yield "r0"
    yield [START, {"type": "http.response.body", "body": b"da", "more_body": True}]
    raise RayActorError


async def full() -> AsyncIterator[Any]:
    for number in (2,):
        raise BackPressureError(num_queued_requests=3, max_queued_requests=number)
    yield


async def never() -> AsyncIterator[Any]:
    await asyncio.sleep(60)
    yield


def ask(app: Any, path: str = COMPLETIONS, **more: Any) -> tuple[int, list[Any], bytes]:
    """The status, headers and body of an answer to `{}`."""

    async def run() -> list[Any]:
        batches = answers(app, {**post_head(path, 2), **more}, b"{}")
        return [message async for batch in batches for message in batch]

    start, *parts = asyncio.run(run())
    body = b"".join(one.get("body", b"") for one in parts)
    return start["status"], start["headers"], body


def test_what_ends_before_it_begins_goes_to_another_engine() -> None:
    handle = Handle([gone, answered])
    app = FrontApplication(handle, 100)
    status, headers, body = ask(app)
    assert (status, body) == (200, b'{"id": "cmpl-1"}')
    assert headers == [(b"a", b"b")]  # the proxy has the other one
    assert len(handle.asked) == 2
    assert handle.cancelled == 1


@pytest.mark.parametrize("name", ["cmpl-1", "mine"])
def test_what_is_known_of_an_answer_is_asked_where_it_was_made(name: str) -> None:
    handle = Handle([answered, answered])
    app = FrontApplication(handle, 100)
    ask(app)
    ask(app, f"/v1/requests/{name}", method="GET")
    assert [home for *_, home in handle.asked] == ["", "r1"]


def test_an_engine_that_ends_twice_or_is_full_is_an_error_for_the_client() -> None:
    for calls, why in (([gone, gone], "has ended"), ([full], "backpressure")):
        status, _, body = ask(FrontApplication(Handle([*calls]), 100))
        assert status == 503
        assert why in json.loads(body)["error"]["message"].lower()


def test_an_answer_that_has_begun_is_cut() -> None:
    handle = Handle([cut, answered])
    with pytest.raises(RayActorError):
        ask(FrontApplication(handle, 100))
    assert len(handle.asked) == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/metrics", 404), ("/v1/../x", 400), ("/health", 200)]
)
def test_what_is_not_for_engines(path: str, status: int) -> None:
    assert ask(FrontApplication(Handle([]), 100), path)[0] == status


def test_large_bodies_are_refused() -> None:
    assert ask(FrontApplication(Handle([]), 1))[0] == 413


async def check_leaving() -> None:
    handle = Handle([never])
    app = FrontApplication(handle, 100)
    calls = answers(app, post_head(COMPLETIONS, 2), b"{}")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(anext(calls), 0.05)
    await calls.aclose()
    assert handle.cancelled == 1


def test_a_client_that_leaves_ends_its_request() -> None:
    asyncio.run(check_leaving())


async def check_handles() -> None:
    async def events() -> AsyncIterator[Any]:
        parts = (b'data: {"a": "\xc3', b'\xa4"}\n\nda', b"ta: [DONE]\n\n")
        yield [{**START, "headers": []}]
        for part in parts:
            yield [{"type": "http.response.body", "body": part, "more_body": True}]
        yield [{"type": "http.response.body"}]

    async def failed() -> AsyncIterator[Any]:
        body = b'event: error\ndata: {"error": {"message": "no"}}\n\n'
        yield [{**START, "headers": []}, {"type": "http.response.body", "body": body}]

    handle = Handle([answered, events, failed])
    front = ServedFront(handle, 100)
    assert await front.ask(COMPLETIONS, {}, "key") == {"id": "cmpl-1"}
    head, body, _ = handle.asked[0]
    assert (b"authorization", b"Bearer key") in head["headers"]
    assert [one async for one in front.stream(COMPLETIONS, {})] == [{"a": "ä"}]
    assert json.loads(handle.asked[1][1]) == {"stream": True}
    with pytest.raises(AnswerError, match="500: no"):
        [one async for one in front.stream(COMPLETIONS, {})]
    with pytest.raises(AnswerError, match="404: "):
        await front.ask("/nothing", {})
    assert body == b"{}"


def test_calls_of_handles() -> None:
    asyncio.run(check_handles())
