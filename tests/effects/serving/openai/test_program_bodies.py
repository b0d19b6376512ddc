"""What programs send: the fields of their requests, with other texts."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.effects.served import Serving
from tests.effects.serving.scripted_model import agent_server, script

TEXT = "filler text of a recorded request"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": TEXT,
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
USER = {"role": "user", "content": TEXT}
PARTS = {"role": "user", "content": [{"type": "text", "text": TEXT}]}
INPUT_PARTS = {"role": "user", "content": [{"type": "input_text", "text": TEXT}]}
# A program, its version, and a path with a body.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GuideLLM 0.8.1, chat": (
        "chat/completions",
        {
            "stream": True,
            "stream_options": USAGE,
            "max_completion_tokens": 16,
            "ignore_eos": True,
            "messages": [PARTS],
        },
    ),
    "GuideLLM 0.8.1, completions": (
        "completions",
        {
            "stream": True,
            "stream_options": USAGE,
            "max_tokens": 16,
            "ignore_eos": True,
            "prompt": TEXT,
        },
    ),
    "GuideLLM 0.8.1, responses": (
        "responses",
        {
            "stream": True,
            "max_output_tokens": 16,
            "ignore_eos": True,
            "input": [INPUT_PARTS],
        },
    ),
    "lm-eval, chat": (
        "chat/completions",
        {
            "messages": [USER],
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n"],
            "seed": 1234,
        },
    ),
    "lm-eval, completions": (
        "completions",
        {
            "prompt": [[5, 6, 7]],
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n"],
            "seed": 1234,
        },
    ),
    "ai and @ai-sdk/openai-compatible": (
        "chat/completions",
        {
            "max_tokens": 30,
            "temperature": 0,
            "messages": [USER],
            "tools": [ADD],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with agent_server(tmp_path_factory.mktemp("programs") / "m") as server:
        yield server


@pytest.mark.parametrize("program", BODIES)
def test_its_request_is_served(server: Serving, program: str) -> None:
    path, body = BODIES[program]
    with script(server, ["An answer of more than sixteen tokens."]):
        response = server.post(path, model="tiny", **body)
    assert response.status_code == 200, response.text
    assert "x-minfer-ignored" not in response.headers
