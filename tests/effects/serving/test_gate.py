"""Before a model is loaded everybody is told so, and afterwards the gate is not there."""

import asyncio
import json
from typing import Any

import pytest

from minfer.effects.serving.processes.gate import Gate
from tests.effects.serving.raw_requests import asgi


def get(gate: Gate, path: str) -> tuple[int, Any, dict[bytes, bytes]]:
    start, body = asyncio.run(asgi(gate, path, b"{}"))
    return start["status"], json.loads(body["body"]), dict(start["headers"])


@pytest.mark.parametrize("path", ["/health", "/healthz"])
def test_a_process_that_loads_is_healthy(path: str) -> None:
    gate = Gate(lambda: "loading the model")
    status, body, _ = get(gate, path)
    assert (status, body) == (200, {"status": "loading: loading the model"})


def test_a_loading_server_is_not_ready_and_says_how_far_it_is() -> None:
    steps = ["", "loading weights (3 of 9)"]
    gate = Gate(lambda: steps[0])
    assert get(gate, "/ready")[:2] == (503, {"status": "starting"})
    del steps[0]
    assert get(gate, "/ready")[:2] == (503, {"status": "loading weights (3 of 9)"})


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/metrics", "/x"]
)
def test_other_requests_are_refused_until_it_is_ready(path: str) -> None:
    status, body, headers = get(Gate(lambda: "loading the model"), path)
    assert status == 503
    assert "the server is not ready: loading the model" in body["error"]["message"]
    assert int(headers[b"retry-after"]) >= 1


def test_a_web_socket_is_closed() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Gate(lambda: "")({"type": "websocket", "path": "/"}, receive, send))
    assert [(message["type"], message["code"]) for message in sent] == [
        ("websocket.close", 1013)
    ]


def test_once_it_is_there_the_application_answers_everything() -> None:
    gate = Gate(lambda: "waiting for the engine")
    paths: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        paths.append(scope["path"])

    gate.application = application  # type: ignore[assignment]  # as much of one as it needs
    for path in ("/health", "/ready", "/v1/models"):
        assert asyncio.run(asgi(gate, path, b"")) == []
    assert paths == ["/health", "/ready", "/v1/models"]
