"""What killed an engine of one backend is sent to no other one for ten minutes."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from minfer.effects.cluster.link.crash_denylist import CrashDenylist
from minfer.effects.cluster.link.crash_rule import REFUSED_SECONDS
from minfer.effects.serving.anthropic.error_format import failure as anthropic_failure
from minfer.effects.serving.client_errors import KILLED_ENGINE, ApiError
from minfer.effects.serving.wire.error_form import failure as openai_failure
from tests.effects.proxy.fakes import (
    TEAMS,
    ReceivedRequest,
    begin_events,
    chunk,
    routing,
    run,
    write_json,
)

ERROR = ApiError("it did", None, KILLED_ENGINE, 500)
BODY = {"prompt": "bad", "max_tokens": 5, "seed": 1, "user": "x"}
A, B = {"x-api-key": "a"}, {"x-api-key": "b"}


def killed_at(url: str, *, stream: bool) -> Any:
    """A backend whose engines die of a bad prompt."""
    failure = anthropic_failure if "messages" in url else openai_failure
    data = failure(ERROR).event.data

    async def answer(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        body = request.body
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if json.loads(body)["prompt"] != "bad":
            write_json(writer, {"text": f'"code":"{KILLED_ENGINE}"'})
        elif stream:
            begin_events(writer, b"data: 1\n\n")
            event = f"data: {data}\n\n"
            for half in (event[:-30], event[-30:]):  # the error comes in two parts
                writer.write(chunk(half.encode()))
                await writer.drain()
                await asyncio.sleep(0.05)
            writer.write(chunk(b""))
        else:
            write_json(writer, json.loads(data), 500)

    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_the_request_in_its_answer_is_no_error(*, stream: bool) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:

            async def repeat(
                request: ReceivedRequest, writer: asyncio.StreamWriter
            ) -> None:
                metadata = json.loads(request.body)["metadata"]
                answer = {"id": "resp_1", "error": None, "metadata": metadata}
                if not stream:
                    write_json(writer, answer)
                    return
                created = {"type": "response.created", "response": answer}
                begin_events(writer, f"data: {json.dumps(created)}\n\n".encode())
                writer.write(chunk(b""))

            harness.backends[0].answer = repeat
            body = {"input": "x", "metadata": {"error": {"code": KILLED_ENGINE}}}
            for _ in range(2):
                answer = await harness.http.post("/v1/responses", json=body)
                assert answer.status_code == 200
                assert KILLED_ENGINE in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", ["/v1/completions", "/v1/messages"])
def test_a_body_that_killed_an_engine_is_not_forwarded_again(
    url: str, *, stream: bool
) -> None:
    now = 0.0

    @run
    async def _() -> None:
        nonlocal now
        async with routing(2, keys=TEAMS) as harness:
            harness.router._denied_bodies._denylist = CrashDenylist(lambda: now)
            for backend in harness.backends:
                backend.answer = killed_at(url, stream=stream)

            async def ask(headers: dict[str, str] = A, **fields: Any) -> int:
                """The status; and whether a backend got it, as a negative sign."""
                before = sum(len(backend.seen) for backend in harness.backends)
                body = {**BODY, **fields}
                answer = await harness.http.post(url, json=body, headers=headers)
                if sum(len(backend.seen) for backend in harness.backends) > before:
                    return -answer.status_code
                assert KILLED_ENGINE in answer.text
                return answer.status_code

            failed = -200 if stream else -500
            assert await ask(prompt="good") == -200
            assert await ask() == failed
            assert await ask(seed=2, user="y") == 400
            packed = gzip.compress(json.dumps({**BODY, "seed": 3}).encode())
            head = {**A, "content-encoding": "gzip"}
            answer = await harness.http.post(url, content=packed, headers=head)
            assert answer.status_code == 400
            assert await ask(max_tokens=6) == failed
            assert await ask(prompt="good") == -200
            assert await ask(B) == failed, "another tenant's"
            now = REFUSED_SECONDS + 1.0
            assert await ask() == failed
