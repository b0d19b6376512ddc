"""Hints without effect are named in each answer's header, and once in the log."""

import json
import logging
from typing import Any

import pytest
from websockets.sync.client import connect

from minfer.effects.serving.request_parsing.ignored_hints import (
    collect_ignored,
    log_ignored,
    note_ignored,
)
from minfer.effects.serving.request_receiver import LONG_BODY_BYTES
from tests.effects.served import Serving

HEADER = "x-minfer-ignored"
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": [CACHED, CACHED]}],
    "max_tokens": 2,
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_header_names_each_hint_once(bundled: Serving, stream: bool) -> None:
    answer = bundled.post("messages", **BODY, stream=stream, service_tier="priority")
    assert answer.status_code == 200
    assert set(answer.headers[HEADER].split(", ")) == {"cache_control", "service_tier"}


def test_a_request_without_them_has_no_header(bundled: Serving) -> None:
    plain = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
    answer = bundled.post("messages", **plain, service_tier="auto")
    assert answer.status_code == 200
    assert HEADER not in answer.headers


@pytest.mark.parametrize("length", [1, LONG_BODY_BYTES + 1])
def test_questions_have_it_too(bundled: Serving, length: int) -> None:
    system = [{**CACHED, "text": "x" * length}]
    answer = bundled.post(
        "messages/count_tokens", messages=BODY["messages"], system=system
    )
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "cache_control"


def test_a_socket_has_it_in_the_last_message(bundled: Serving) -> None:
    with connect(f"{bundled.url.replace('http', 'ws')}/v1/stream") as socket:
        for body in (BODY, {**BODY, "messages": [{"role": "user", "content": "hi"}]}):
            socket.send(json.dumps({"id": "a", "endpoint": "messages", "body": body}))
            message: dict[str, Any] = {}
            while "done" not in message:
                message = json.loads(socket.recv())
            noted = (
                {} if "cache_control" not in str(body) else {"ignored": ["cache_control"]}
            )
            assert message == {"id": "a", "done": True, **noted}


def test_the_log_has_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    log_ignored(["a_hint", "another_hint"])
    log_ignored(["a_hint"])
    logged = [record.getMessage().split()[0] for record in caplog.records]
    assert logged == ["a_hint", "another_hint"]


def test_names_are_collected_by_request() -> None:
    note_ignored("before")
    with collect_ignored() as hints:
        note_ignored("b")
        note_ignored("a")
        note_ignored("b")
    note_ignored("after")
    assert hints.names == ("b", "a")
