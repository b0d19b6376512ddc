"""Blocks of calls and results, as chat templates take them."""

from typing import Any

import pytest

from minfer.effects.serving.anthropic.blocks import turns_of
from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from minfer.effects.serving.request_parsing.omitted_images import OMITTED_IMAGE
from tests.effects.serving.anthropic.helpers import HI, body, refused

USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": [1, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
TEXT = {"type": "text", "text": "x"}
PIXELS = {"type": "base64", "media_type": "image/png", "data": "eHh4"}
IMAGE = {"type": "image", "source": PIXELS}
CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": [1, None]}},
}


def turns(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    before = [*HI, {"role": "assistant", "content": [USE]}] if role == "user" else HI
    (*_, turn) = body(messages=[*before, {"role": role, "content": blocks}]).messages
    return turns_of(turn.role, [turn.content])


def test_calls_are_of_the_message_around_them() -> None:
    plain = {"role": "assistant", "content": [TEXT, TEXT]}
    assert turns("assistant", TEXT, TEXT, USE) == [{**plain, "tool_calls": [CALL]}]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    (turn,) = turns("assistant", thought, TEXT, USE)
    assert turn["reasoning_content"] == "hm"
    assert turns("assistant", USE)[0]["content"] is None
    for cut in ('{"a": [1', ""):
        (call,) = turns("assistant", {**USE, "input": cut})[0]["tool_calls"]
        assert call["function"]["arguments"] == cut


def test_results_are_messages_of_their_own() -> None:
    message = {"role": "tool", "tool_call_id": "t1", "content": "5"}
    assert turns("user", RESULT) == [message]
    with_parts = {**RESULT, "content": [TEXT, TEXT], "is_error": True}
    expected = [{**message, "content": [TEXT, TEXT]}, {"role": "user", "content": "x"}]
    assert turns("user", TEXT, with_parts) == expected
    nothing = {"type": "tool_result", "tool_use_id": "t1"}
    assert turns("user", nothing) == [{**message, "content": ""}]


def test_an_image_in_a_result_is_left_out() -> None:
    with collect_ignored() as hints:
        turn_list = turns("user", {**RESULT, "content": [TEXT, IMAGE]})
    content = [TEXT, {"type": "text", "text": OMITTED_IMAGE}]
    assert turn_list == [{"role": "tool", "tool_call_id": "t1", "content": content}]
    assert hints.names == ("tool_result.image",)


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("assistant", RESULT, "type"),
        ("assistant", {**USE, "input": 5}, "input"),
        ("assistant", {**USE, "id": ""}, "id"),
        ("user", {**RESULT, "content": [{"type": "image"}]}, "content[0].source"),
        ("user", {**RESULT, "content": [{"type": "audio"}]}, "content[0].type"),
        ("user", {"type": "tool_result"}, "tool_use_id"),
        ("user", {"type": 5}, "type"),
    ],
)
def test_what_makes_no_sense(role: str, block: dict[str, Any], param: str) -> None:
    error = refused(messages=[*HI, {"role": role, "content": [block]}])
    assert error.param == f"messages[1].content[0].{param}"
