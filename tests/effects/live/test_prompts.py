"""Every form of a prompt, and what is said of those that are none."""

from typing import Any

import pytest

from minfer.effects.live.errors import RequestError
from minfer.effects.live.input_processing.prompts import (
    TokenizedPrompt,
    as_list,
    encode_text,
    read_prompt,
)
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


class Whole:
    """A whole number of a library's own, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __le__(self, other: int) -> bool:
        return self.value <= other

    def __ge__(self, other: int) -> bool:
        return self.value >= other

    def __lt__(self, other: int) -> bool:
        return self.value < other

    def __gt__(self, other: int) -> bool:
        return self.value > other


def test_one_prompt_or_several() -> None:
    ids = [1, 2]
    assert as_list("ab") == ["ab"]
    assert as_list(ids) == [ids]
    assert as_list({"prompt": "ab"}) == [{"prompt": "ab"}]
    assert as_list([]) == []
    # What is no token id makes it several prompts, of which read_prompt says more.
    prompts: Any
    for prompts in (["ab", ids], [True], [None]):
        assert as_list(prompts) == prompts
    with pytest.raises(RequestError, match="prompts must be a string, token ids"):
        as_list(5)  # type: ignore[arg-type]  # the point


def test_every_form_means_the_same(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("def add"))
    for prompt in ("def add", {"prompt": "def add"}):
        assert read_prompt(prompt, tokenizer, 10_000) == TokenizedPrompt("def add", ids)
    for form in (ids, list(ids), {"prompt_token_ids": ids}, [*map(Whole, ids)]):
        assert read_prompt(form, tokenizer, 10_000) == TokenizedPrompt(None, ids)
    requested = TokenizedPrompt("rendered", [1], b"salt")
    assert read_prompt(requested, None, 2) is requested


def test_a_salt_is_the_prompts_own_or_the_callers() -> None:
    assert read_prompt([1], None, 2, b"theirs").salt == b"theirs"
    prompt = {"prompt_token_ids": [1], "cache_salt": "own\ud800"}
    assert read_prompt(prompt, None, 2, b"theirs").salt == b"own\xed\xa0\x80"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([1, True], r"whole numbers, not True \(at 1\)"),
        ([1.0], r"whole numbers, not 1.0 \(at 0\)"),
        ([0, 9, 10], "token id 10 at position 2 is outside the vocabulary"),
        ([-1], "ids are from 0 to 9"),
        ([Whole(3), 10], "token id 10 at position 1"),
        (None, "a prompt must be a string or token ids, not a NoneType"),
        ({"promt": "a"}, "no field 'promt'"),
        ({}, "needs one of the fields"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "needs one of the fields"),
        ({"prompt_token_ids": [1], "cache_salt": 1}, "cache_salt must be a string"),
        ("a\ud800", "lone surrogate at character 1"),
    ],
)
def test_what_is_no_prompt(tokenizer: Tokenizer, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_prompt(prompt, tokenizer, 10)


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"needs a tokenizer.*; give token ids"):
        encode_text("a", None)
