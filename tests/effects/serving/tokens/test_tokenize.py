"""Token ids are those that a request would have."""

import json
from typing import Any

import pytest

from minfer.effects.serving.tokens.tokenize import TokenizeBody
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import HI, refused


def ask(bundled: Serving, **body: Any) -> dict[str, Any]:
    found = bundled.http.post(f"{bundled.url}/tokenize", json=body)
    assert found.status_code == 200
    to_turn: dict[str, Any] = found.json()
    return to_turn


def test_a_text(bundled: Serving) -> None:
    to_turn = ask(bundled, prompt="def f(", model="bundled")
    tokenizer = bundled.llm.tokenizer
    assert tokenizer is not None
    assert to_turn == {
        "count": len(to_turn["tokens"]),
        "max_model_len": bundled.llm.setup.config.max_model_len,
        "tokens": tokenizer.encode("def f("),
        "token_strs": None,
    }
    assert ask(bundled, prompt="")["count"] == len(tokenizer.encode(""))


def test_tokens_by_name(bundled: Serving) -> None:
    to_turn = ask(bundled, prompt=" def é", return_token_strs=True)
    names = to_turn["token_strs"]
    assert len(names) == to_turn["count"]
    assert "".join(names) == "Ġdefâ".replace(
        "â", "ĠÃ©"
    )  # as byte-level vocabularies have it


def test_special_tokens_are_added_unless_unwanted(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Any] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        requested.append((text, add_special_tokens))
        return [1]

    monkeypatch.setattr(bundled.llm.tokenizer, "encode", encode)
    ask(bundled, prompt="a")
    ask(bundled, prompt="b", add_special_tokens=False)
    assert requested == [("a", True), ("b", False)]


def test_a_conversation(bundled: Serving) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "def"},
    ]
    to_turn = ask(bundled, messages=messages)
    assert to_turn["tokens"] == bundled.llm.render(messages)
    begun = ask(bundled, messages=messages, continue_final_message=True)
    assert begun["tokens"] == bundled.llm.render(
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
    found = bundled.http.post(f"{bundled.url}/tokenize", json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (404, "model")
