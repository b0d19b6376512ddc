"""Token ids are those that a request would have."""

import json
from typing import Any

import pytest

from minfer.effects.serving.tokens.tokenize import TokenizeBody
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import HI, refused


def ask(bundled: Serving, **body: Any) -> dict[str, Any]:
    response = bundled.http.post(f"{bundled.url}/tokenize", json=body)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def test_a_text(bundled: Serving) -> None:
    answer = ask(bundled, prompt="def f(", model="bundled")
    tokenizer = bundled.llm.tokenizer
    assert tokenizer is not None
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": bundled.llm.setup.config.max_model_len,
        "tokens": tokenizer.encode("def f("),
        "token_strs": None,
    }
    assert ask(bundled, prompt="")["count"] == len(tokenizer.encode(""))


def test_tokens_by_name(bundled: Serving) -> None:
    answer = ask(bundled, prompt=" def é", return_token_strs=True)
    names = answer["token_strs"]
    assert len(names) == answer["count"]
    assert "".join(names) == "Ġdefâ".replace(
        "â", "ĠÃ©"
    )  # as byte-level vocabularies have it


def test_special_tokens_are_added_unless_unwanted(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        calls.append((text, add_special_tokens))
        return [1]

    monkeypatch.setattr(bundled.llm.tokenizer, "encode", encode)
    ask(bundled, prompt="a")
    ask(bundled, prompt="b", add_special_tokens=False)
    assert calls == [("a", True), ("b", False)]


def test_a_conversation(bundled: Serving) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "def"},
    ]
    answer = ask(bundled, messages=messages)
    assert answer["tokens"] == bundled.llm.render(messages)
    continued = ask(bundled, messages=messages, continue_final_message=True)
    assert continued["tokens"] == bundled.llm.render(
        messages, add_generation_prompt=False, continue_final_message=True
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HI}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    assert refused(TokenizeBody, json.dumps(fields).encode()).param == param


def test_an_unknown_model(bundled: Serving) -> None:
    body = {"prompt": "x", "model": "gpt"}
    response = bundled.http.post(f"{bundled.url}/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
