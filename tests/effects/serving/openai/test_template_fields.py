"""Fields that reach the chat template, and the special tokens of answers."""

import json
from typing import Any

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import HI, refused

TEMPLATE = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ verbosity }}|"
OWN = {"enable_thinking": "own", "verbosity": "own"}


def rendered(bundled: Serving, kind: type[ChatBody | ResponsesBody], **body: Any) -> str:
    tokenizer = bundled.llm.tokenizer
    assert tokenizer is not None
    request = read_body(kind, json.dumps(body).encode()).generation(bundled.llm)
    return tokenizer.decode(request.prompts[0].ids)


# Which variables follow from the fields, by vLLM's protocol.py of chat completions.
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "|||"),
        ({"reasoning_effort": "high"}, "high|True||"),
        ({"reasoning_effort": "none"}, "none|False||"),
        ({"verbosity": "low"}, "||low|"),
        ({"chat_template_kwargs": OWN}, "|own|own|"),
        (
            {"chat_template_kwargs": OWN, "reasoning_effort": "max", "verbosity": "low"},
            "max|own|low|",
        ),
    ],
)
def test_effort_and_verbosity_reach_the_template_of_a_chat(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", TEMPLATE)
    assert rendered(bundled, ChatBody, messages=HI, **fields) == text


def test_effort_and_verbosity_reach_the_template_of_a_response(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", TEMPLATE)
    request_fields: dict[str, Any] = {
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "high"},
    }
    assert (
        rendered(bundled, ResponsesBody, input="x", **request_fields) == "low|True|high|"
    )
    response = bundled.post(
        "responses", input="x", max_output_tokens=1, **request_fields
    ).json()
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "high"}
    for fields, param in (
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ):
        body = json.dumps({"input": "x", **fields}).encode()
        assert refused(ResponsesBody, body).param == param


def test_special_tokens_come_with_the_text_if_they_are_not_skipped(
    bundled: Serving,
) -> None:
    tokenizer = bundled.llm.tokenizer
    assert tokenizer is not None
    token = min(tokenizer.special_ids - set(tokenizer.eos_ids))
    name = tokenizer.token_names([token])[0]
    request_fields: dict[str, Any] = {"allowed_token_ids": [token], "max_tokens": 2}
    for skip, text in ((None, ""), (True, ""), (False, name)):
        body = {**request_fields, "skip_special_tokens": skip}
        completion = bundled.post("completions", prompt=[token, 300], echo=True, **body)
        echo = text + tokenizer.decode([300])
        assert completion.json()["choices"][0]["text"] == echo + 2 * text
        chat = bundled.post("chat/completions", messages=HI, **body).json()
        assert (chat["choices"][0]["message"]["content"] or "") == 2 * text
