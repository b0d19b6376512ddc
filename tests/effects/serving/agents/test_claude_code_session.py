"""A recorded session of Claude Code, sent again: each request is taken, and of each turn
what was sent before is a prefix hit.
"""

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest

from minfer.effects.proxy.prompt_keys import read_fields, text_keys
from minfer.effects.serving.anthropic.conversation import BILLING_PREFIX
from minfer.effects.serving.anthropic.create_message import MessagesBody
from minfer.effects.text.chat_templates import ChatTemplateError
from tests.effects.scripted import TEMPLATE, say
from tests.effects.served import Serving
from tests.effects.serving.agents.record_claude_code import Session
from tests.effects.text.system_templates import SHORT, public_templates

HISTORY = 0.95  # the least share of what was sent before that is a prefix hit
SLACK = 1  # blocks at the end of a prompt whose text goes on in the next
QUESTION = 6  # the turn in which the user asks for more


def bodies() -> list[dict[str, Any]]:
    """The bodies of the session, each with another nonce in its block about billing."""
    recorded = Session.load().bodies
    assert len(recorded) >= 10
    # Mistral's templates refuse other ids.
    ids = dict.fromkeys(re.findall(r"call_\w+", json.dumps(recorded)))
    text = json.dumps(recorded)
    for number, name in enumerate(ids):
        text = text.replace(name, f"call{number:05}")
    read: list[dict[str, Any]] = json.loads(text)
    for turn, body in enumerate(read):
        first, *later_blocks = body["system"]
        assert first["text"].startswith(BILLING_PREFIX)
        body["system"] = [
            {**first, "text": f"{BILLING_PREFIX} cch={turn};"},
            *later_blocks,
        ]
    return read


def test_each_request_is_read() -> None:
    for body in bodies():
        assert MessagesBody.model_validate(body).offers


def test_a_router_sees_the_history_again() -> None:
    before: Sequence[bytes] = ()
    for body in bodies():
        data = json.dumps(body).encode()
        keys = text_keys(read_fields(data), data).keys
        assert list(keys[: len(before)]) == list(before)
        assert len(keys) > len(before)
        before = keys[: -SLACK or None]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_the_history_is_a_prefix_hit(talker: Serving, stream: bool) -> None:
    say(talker.llm, "done")
    talker.llm.reset_prefix_cache()
    before = 0
    for body in bodies():
        answer = talker.post("messages", **{**body, "max_tokens": 1, "stream": stream})
        assert answer.status_code == 200, answer.text
        usage = usage_of(answer.text)
        assert usage["cache_read_input_tokens"] >= HISTORY * before
        before = usage["cache_read_input_tokens"] + usage["input_tokens"]
        counted = talker.post("messages/count_tokens", **body)
        assert counted.json()["input_tokens"] == before


def usage_of(text: str) -> dict[str, Any]:
    """The last usage in an answer."""
    *_, last = text.rpartition('"usage": ')
    usage: dict[str, Any] = json.JSONDecoder().raw_decode(last)[0]
    return usage


def shares(talker: Serving) -> list[float]:
    """By turn, the share of the prompt before that begins this prompt, too."""
    before: Sequence[int] = ()
    shares_by_turn = []
    for body in bodies():
        (prompt,) = MessagesBody.model_validate(body).generation(talker.llm).prompts
        pairs = zip(before, prompt.ids, strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shares_by_turn.append(equal / max(1, len(before)))
        before = prompt.ids
    return shares_by_turn[1:]


@pytest.mark.long
@pytest.mark.parametrize("template", SHORT)
def test_late_messages_do_not_cost_the_cache(
    talker: Serving, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = TEMPLATE.partition("{% for m in messages %}")[0]
    monkeypatch.setattr(talker.llm.tokenizer, "chat_template", tools + SHORT[template])
    assert min(shares(talker)) >= HISTORY


@pytest.mark.claimed
@pytest.mark.parametrize("template", public_templates() or [""])
def test_with_public_templates(
    talker: Serving, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not template:
        pytest.skip("MINFER_CHAT_TEMPLATES names no folder of templates")
    monkeypatch.setattr(
        talker.llm.tokenizer, "chat_template", public_templates()[template]
    )
    monkeypatch.setattr(
        talker.llm.tokenizer, "special_tokens", {"bos_token": "", "eos_token": ""}
    )
    try:
        low = {turn for turn, share in enumerate(shares(talker), 1) if share < HISTORY}
    except ChatTemplateError as error:
        pytest.skip(f"the template refuses calls of tools: {error}")
    # Templates that drop reasoning do so when the user asks again.
    assert low <= {QUESTION}
