"""Tokens are counted as the answer would count them."""

from typing import Any

import anthropic as sdk
import pytest
from anthropic import Anthropic

from tests.effects.served import Serving

CONVERSATION: dict[str, Any] = {
    "model": "bundled",
    "system": "You write Python.",
    "messages": [{"role": "user", "content": "Write a Python function is_prime."}],
}


def test_what_is_counted_is_what_is_read(anthropic: Anthropic) -> None:
    counted = anthropic.messages.count_tokens(**CONVERSATION).input_tokens
    usage = anthropic.messages.create(**CONVERSATION, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_nothing_is_generated(bundled: Serving) -> None:
    before = bundled.llm.count
    assert (
        bundled.post("messages/count_tokens", **CONVERSATION).json()["input_tokens"] > 9
    )
    assert bundled.llm.count == before


def test_errors_are_anthropics(anthropic: Anthropic) -> None:
    with pytest.raises(sdk.BadRequestError, match="colour: is not a field here"):
        anthropic.messages.count_tokens(**CONVERSATION, extra_body={"colour": 5})
    with pytest.raises(sdk.NotFoundError):
        anthropic.messages.count_tokens(**{**CONVERSATION, "model": "claude"})


def test_a_template_that_fails_is_reported(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", "{{ 1 / 0 }}")
    response = bundled.post("messages/count_tokens", **CONVERSATION)
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]
