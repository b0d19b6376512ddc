"""Texts of markers are texts: they are split as others are."""

import json
from typing import Any

import pytest

from minfer.effects.text.grammars.vocabulary import without_markers
from tests.effects.text.grammars.bundled import ENDS, allowed, matcher, tokenizer

MARKERS = ["</tool_call>", "a<|im_end|>", "<|endoftext|>", "ab <think> cd"]


def written(**requested: Any) -> str:
    """What comes of always taking the longest token."""
    walk, made = matcher(**requested), bytearray()
    while not walk.may_end:
        there = {one: tokenizer().token_bytes(one) for one in allowed(walk.mask())}
        token = max(there, key=lambda one: len(there[one]))
        assert token not in ENDS
        walk.advance([token])
        made += there[token]
    return made.decode()


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
    found = without_markers(json.dumps({"added_tokens": added, "model": model}))
    assert found.ids == {"<s>": 0, "<b>": 2}
    record = json.loads(found.text)
    names = [one["content"] for one in record["added_tokens"]]
    assert names[1] == "a"
    assert not {"<s>", "<b>"} & {*names}
    known = record["model"]["vocab"]
    known = {*known} if isinstance(known, dict) else {one for one, _ in known}
    assert known == {names[0], "a"}
    assert record["model"]["unk_token"] == names[0]
