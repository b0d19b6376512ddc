"""Token ids become the text that they came from."""

from typing import Any

import pytest

from tests.effects.served import Serving


def ask(bundled: Serving, **body: Any) -> tuple[int, Any]:
    response = bundled.http.post(f"{bundled.url}/detokenize", json=body)
    return response.status_code, response.json()


@pytest.mark.parametrize("text", ["", "def f(x):\n    é", "<|endoftext|>"])
def test_there_and_back(bundled: Serving, text: str) -> None:
    assert bundled.llm.tokenizer is not None
    ids = bundled.llm.tokenizer.encode(text, add_special_tokens=False)
    assert ask(bundled, tokens=ids) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("tokens", "param", "words"),
    [
        (None, "tokens", "is missing"),
        ("x", "tokens", "must be a list"),
        ([1, "a"], "tokens[1]", "must be a whole number"),
        ([1, -1], "tokens", "outside the vocabulary"),
        ([10**6], "tokens", "outside the vocabulary"),
    ],
)
def test_what_is_no_token(bundled: Serving, tokens: Any, param: str, words: str) -> None:
    status, answer = ask(bundled, tokens=tokens)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


def test_without_a_tokenizer(bundled: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.llm, "tokenizer", None)
    status, answer = ask(bundled, tokens=[1])
    assert (status, answer["error"]["param"]) == (400, "tokens")
    assert "skip_tokenizer_init" in answer["error"]["message"]
