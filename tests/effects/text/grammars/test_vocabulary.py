"""Texts of markers are texts: they are split as others are."""

import json
from typing import Any

import pytest

from minfer.effects.text.grammars.vocabulary import without_markers
from tests.effects.text.grammars.bundled import ENDS, allowed, matcher, tokenizer

MARKERS = ["</tool_call>", "a<|im_end|>", "<|endoftext|>", "ab <think> cd"]


def written(**requested: Any) -> str:
    """What comes of always taking the longest token."""
    walk, text = matcher(**requested), bytearray()
    while not walk.may_end:
        token_texts = {
            token: tokenizer().token_bytes(token) for token in allowed(walk.mask())
        }
        token = max(token_texts, key=lambda one: len(token_texts[one]))
        assert token not in ENDS
        walk.advance([token])
        text += token_texts[token]
    return text.decode()


@pytest.mark.parametrize("text", MARKERS)
def test_the_text_of_a_marker_can_be_written(text: str) -> None:
    assert written(choice=[text]) == text
    assert written(choice=[text, text + "!"]) == text
    assert json.loads(written(json={"const": text})) == text


@pytest.mark.parametrize("words", [{"<s>": 0, "a": 1}, [["<s>", 0.0], ["a", -1.5]]])
def test_markers_that_the_model_knows_are_renamed_there_too(words: Any) -> None:
    added = [
        {"id": 0, "content": "<s>", "special": True},
        {"id": 1, "content": "a", "special": False},
        {"id": 2, "content": "<b>", "special": False},
    ]
    model = {"vocab": words, "unk_token": "<s>"}
    renamed = without_markers(json.dumps({"added_tokens": added, "model": model}))
    assert renamed.ids == {"<s>": 0, "<b>": 2}
    record = json.loads(renamed.text)
    names = [token["content"] for token in record["added_tokens"]]
    assert names[1] == "a"
    assert not {"<s>", "<b>"} & {*names}
    vocabulary = record["model"]["vocab"]
    vocabulary = (
        {*vocabulary}
        if isinstance(vocabulary, dict)
        else {token for token, _ in vocabulary}
    )
    assert vocabulary == {names[0], "a"}
    assert record["model"]["unk_token"] == names[0]
