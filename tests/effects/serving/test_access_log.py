"""Each request is one line, which says what it was, and never what was asked."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from attrs import frozen

from minfer.effects.serving.observability.access_log import AccessLog
from minfer.effects.serving.observability.records import JsonObject
from tests.effects.served import Serving
from tests.effects.serving.test_server import process

HEAD = {"type": "http.response.start", "status": 201, "headers": []}


class LineList:
    """In the place of `LineWriter`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, line: Any) -> None:
        self.lines.append(line())


@frozen
class Key:
    """A client's."""

    name: str


def logged(
    *messages: Any,
    form: str = "json",
    record: Any = None,
    error: Exception | None = None,
    **scope: Any,
) -> list[str]:
    """The lines of one request, to an application that answers so."""
    writer: Any = LineList()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive
        scope["minfer.key"] = Key("Ann's own") if scope["path"] != "/open" else None
        for message in messages:
            await send(message)
        if error:
            raise error

    async def run() -> None:
        async def send(message: Any) -> None:
            del message

        def known(name: str, _: str) -> JsonObject | None:
            return record if name == "cmpl-1" else None

        log = AccessLog(app, writer, form, "api 0", known)
        full = {"type": "http", "method": "POST", "path": "/v1/completions", **scope}
        try:
            await log({"raw_path": full["path"].encode(), **full}, None, send)  # type: ignore[arg-type]  # nothing is received
        except ZeroDivisionError:
            assert error is not None

    asyncio.run(run())
    lines: list[str] = writer.lines
    return lines


def named(name: str) -> dict[str, Any]:
    return {**HEAD, "headers": [(b"x-request-id", name.encode())]}


def test_a_line_for_programs() -> None:
    prompts = [{"prompt_tokens": 3, "output_tokens": 4}] * 2
    record = {"endpoint": "/v1/completions", "model": "m", "prompts": prompts}
    (line,) = logged(named("cmpl-1"), record=record)
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert 0 <= entry.pop("ms") < 1000
    assert entry == {
        "process": "api 0",
        "method": "POST",
        "path": "/v1/completions",
        "status": 201,
        "request_id": "cmpl-1",
        "key": "Ann's own",
        "model": "m",
        "prompt_tokens": 6,
        "output_tokens": 8,
    }


def test_a_line_for_people() -> None:
    (line,) = logged(named("cmpl-1"), form="text")
    _, _, words = line.partition(" ")
    before, _, after = words.partition(" 201 ")
    assert before == "api 0: POST /v1/completions"
    assert after.endswith(' ms id=cmpl-1 key="Ann\'s own"')


def test_what_a_client_chose_stays_in_its_line() -> None:
    lines = logged(
        named('a" b'), form="text", path="/a\n/b", raw_path=b"/a%0A/b\xff" + b"x" * 999
    )
    (line,) = lines
    assert "\n" not in line
    assert " /a%0A/b\\xffxxx" in line
    assert 'id="a\\" b"' in line
    assert len(line) < 800


@pytest.mark.parametrize(
    ("messages", "error", "status"),
    [
        ([], None, 499),  # the client left
        ([], ZeroDivisionError(), 500),
        ([HEAD], ZeroDivisionError(), 201),  # as the client saw it
    ],
)
def test_every_end_has_a_status(
    messages: list[Any], error: Exception | None, status: int
) -> None:
    (line,) = logged(*messages, error=error)
    assert json.loads(line)["status"] == status


def test_a_socket_is_one_line() -> None:
    (line,) = logged({"type": "websocket.accept"}, type="websocket", method="WEBSOCKET")
    assert (json.loads(line)["status"], json.loads(line)["method"]) == (101, "WEBSOCKET")


@pytest.mark.parametrize("path", ["/health", "/healthz", "/ready", "/metrics"])
def test_probes_are_quiet(path: str) -> None:
    assert not logged(HEAD, path=path)


def test_the_tokens_of_an_answer_are_those_of_its_usage(bundled: Serving) -> None:
    writer: Any = LineList()
    records = bundled.service.records
    answer = bundled.post("completions", prompt=["def f(", "x"], max_tokens=3)
    name = answer.headers["x-request-id"]
    bundled.until(lambda: not records.live)
    log = AccessLog(bundled.service, writer, "json", "server", records.find)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    log._log(scope, named(name), 0.0, 1.0)
    entry = json.loads(writer.lines[0])
    usage = answer.json()["usage"]
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["output_tokens"] == usage["completion_tokens"]
    assert "def f" not in writer.lines[0]


@pytest.mark.long
def test_a_front_logs_as_itself_after_the_first_line() -> None:
    options = ("--dry-run", "--api-processes", "1", "--access-log", "json")
    with process(*options) as (running, url):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        httpx.get(f"{url}/health")
        httpx.post(f"{url}/v1/completions", json=body)
        running.terminate()
        out, err = running.communicate(timeout=30)
    entries = [json.loads(line) for line in out.splitlines()]
    assert [(entry["process"], entry["status"]) for entry in entries] == [("api 0", 200)]
    assert (entries[0]["prompt_tokens"], entries[0]["output_tokens"]) == (1, 2)
    assert "WARNING" not in err
    assert "Traceback" not in err
