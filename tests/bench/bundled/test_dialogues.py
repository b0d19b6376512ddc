"""A conversation's text is what the chat template makes of it, here and elsewhere."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from bench.bundled.dialogues import CLOSED, OPENED, Dialogue, any_dialogue
from bench.bundled.prepare import TOKENIZER
from bench.bundled.vocabulary import TEMPLATE
from minfer.effects.text.chat import _render


def templated(messages: Any, tools: Any, **values: Any) -> str:
    return _render(
        TEMPLATE, {"messages": messages}, {"tools": list(tools) or None, **values}
    )


def last_user(dialogue: Dialogue) -> int:
    return max(
        i for i, message in enumerate(dialogue.messages) if message["role"] == "user"
    )


def conversations(count: int = 400) -> list[Dialogue]:
    rng = Random(5)
    return [any_dialogue(rng) for _ in range(count)]


def test_the_text_is_the_templates() -> None:
    for one in conversations():
        whole = templated(one.messages, one.tools, add_generation_prompt=False)
        assert one.text().replace(CLOSED, "") == whole


def test_an_answer_goes_on_where_the_prompt_ends() -> None:
    given = {
        OPENED: {"enable_thinking": True},
        CLOSED: {"enable_thinking": False},
        "": {},
    }
    seen = set()
    for one in conversations():
        asked = one.messages[: last_user(one) + 1]
        prompt = templated(
            asked, one.tools, add_generation_prompt=True, **given[one.given]
        )
        assert one.text().startswith(prompt)
        seen.add(one.given)
    assert seen == set(given)


def test_transformers_renders_alike(data: Path) -> None:
    make: Any = PreTrainedTokenizerFast
    theirs = make(tokenizer_file=str(data / TOKENIZER), chat_template=TEMPLATE)
    for one in conversations(60):
        tools = list(one.tools) or None
        text = theirs.apply_chat_template(list(one.messages), tools=tools, tokenize=False)
        assert one.text().replace(CLOSED, "") == text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
            "<|im_start|>assistant\nYes.<|im_end|>\n",
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n',
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
            "<|im_start|>assistant\nYes.<|im_end|>\n",
        ),
    ],
)
def test_messages_as_clients_write_them(message: dict[str, Any], expected: str) -> None:
    user = {"role": "user", "content": "?"}
    text = templated([user, message, user], (), add_generation_prompt=False)
    assert expected in text


def test_marks_are_tokens_and_part_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<think>12</think>").ids
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "a<think>12</think>"
