"""Requests as a server gets them."""

import json
from typing import Any

from minfer.effects.runs.load.prompts import Listed, ListedPrompts
from tests.effects.runs.load.stub import load_on


def sent(request: bytes) -> tuple[str, dict[str, Any]]:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
    return head.split(b" ")[1].decode(), json.loads(body)


def test_a_completion_asks_for_a_stream_with_usage() -> None:
    load = load_on("http://h:1/x", target={"body": {"temperature": 0.5}})
    path, body = sent(load.request(0))
    assert path == "/x/v1/completions"
    assert len(body.pop("prompt")) == 4
    assert body == {
        "model": "one",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    _, body = sent(load_on("http://h:1", target={"stream": False}).request(0))
    assert "stream" not in body


def test_a_chat_has_messages() -> None:
    conversation = [{"role": "system", "content": "x"}]
    prompts = ListedPrompts([Listed("hello", 3), Listed(conversation, 3)])
    load = load_on("http://h:1", target={"chat": True}, prompts=prompts)
    path, body = sent(load.request(0))
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert sent(load.request(1))[1]["messages"] == conversation


def test_warming_up_asks_other_prompts_without_the_pace() -> None:
    load = load_on("http://h:1", 50, due=(1.0,) * 50, max_concurrency=3, duration=1.0)
    warm = load.warm_up(8)
    assert (warm.count, warm.due, warm.duration, warm.max_concurrency) == (8, (), None, 3)
    assert warm.request(0) != load.request(0) != load.of_run(1).request(0)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(load_on("http://h:1", target={"key": "secret"}))
