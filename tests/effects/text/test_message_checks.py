"""What a chat template would drop without an error is refused, and named."""

from typing import Any

import pytest

from minfer.effects.text.message_checks import message_error

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
TEXT = {"type": "text", "text": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"content": [TEXT, IMAGE]},
            '.content[1].type: "image_url" is not supported: models read text here,',
        ),
        *(
            (
                {"content": [{"type": kind}]},
                f'.content[0].type: "{kind}" is not supported: models read text here',
            )
            for kind in ("audio_url", "image", "input_image", "video_url")
        ),
        (
            {"content": [{"type": "file"}]},
            '.content[0].type: "file" is not supported; there is "text"',
        ),
        ({"content": [AUDIO]}, '.content[0].type: "input_audio" is not supported'),
        ({"content": [{"type": "video"}]}, '.content[0].type: "video" is not'),
        ({"content": [{"text": "hi"}]}, ".content[0].type: null is not supported"),
        ({"content": [{"type": "text", "text": 5}]}, ".content[0].text: must be a"),
        ({"content": ["hi"]}, ".content[0]: must be an object, not a str"),
        ({"content": 5}, ".content: must be a string or a list of parts, not a int"),
        ({"content": None}, ".content: is missing"),
        ({}, ".content: is missing"),
        ({"role": "assistant"}, ".content: is missing"),
        ({"role": "usr", "content": "hi"}, '.role: "usr" is not supported'),
        ({"role": None, "content": "hi"}, ".role: null is not supported"),
        ({"role": ["user"], "content": "hi"}, '.role: ["user"] is not supported'),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], words: str) -> None:
    error = message_error({"role": "user", **message})
    assert error is not None
    assert error.startswith(words)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": ""},
        {"role": "developer", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ],
)
def test_what_can_be_read(message: dict[str, Any]) -> None:
    assert message_error(message) is None


def test_no_object() -> None:
    assert message_error("hi") == ": must be an object with role and content, not a str"
