"""Documents with text are read; others are refused by the kind of their source."""

from typing import Any

import pytest

from minfer.effects.serving.anthropic.blocks import turns_of
from tests.effects.serving.anthropic.helpers import HI, body, refused

PLAIN = {"type": "text", "media_type": "text/plain", "data": "the text"}
BLOCKS = {"type": "content", "content": [{"type": "text", "text": "the text"}]}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}


def document(source: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


@pytest.mark.parametrize("source", [PLAIN, BLOCKS, {**BLOCKS, "content": "the text"}])
def test_a_document_is_text(source: dict[str, Any]) -> None:
    cached = document(source, cache_control={"type": "ephemeral"}, citations=None)
    (message,) = body(messages=[{"role": "user", "content": [cached]}]).messages
    (turn,) = turns_of("user", [message.content])
    assert turn["content"] == "<document>\nthe text\n</document>"


def test_its_title_and_context_are_shown() -> None:
    titled = document(PLAIN, title="T", context="C", citations={"enabled": False})
    (message,) = body(messages=[{"role": "user", "content": [titled]}]).messages
    (turn,) = turns_of("user", [message.content])
    lines = ["<document>", "<title>T</title>", "<context>C</context>", "the text"]
    assert turn["content"] == "\n".join([*lines, "</document>"])


def test_a_result_may_have_one() -> None:
    text = {"type": "text", "text": "x"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [text, document(PLAIN)],
    }
    messages = [
        *HI,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result]},
    ]
    (turn,) = turns_of("user", [body(messages=messages).messages[-1].content])
    assert turn["content"] == [
        text,
        {"type": "text", "text": "<document>\nthe text\n</document>"},
    ]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (document({"type": "base64", "data": "x"}), "source.type"),
        (document({"type": "url", "url": "x"}), "source.type"),
        (document(5), "source"),
        (document({**PLAIN, "media_type": "application/pdf"}), "source.media_type"),
        (document({**PLAIN, "data": 5}), "source.data"),
        (document(PLAIN, citations={"enabled": True}), "citations"),
        (document(PLAIN, title=5), "title"),
        (
            document({**BLOCKS, "content": [{"type": "image"}]}),
            "source.content[0].type",
        ),
    ],
)
def test_what_cannot_be_read(block: dict[str, Any], param: str) -> None:
    error = refused(messages=[{"role": "user", "content": [block]}])
    assert error.param == f"messages[0].content[0].{param}"
