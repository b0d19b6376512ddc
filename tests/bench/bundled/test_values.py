"""Values that a model is to learn to end."""

import json
import re
from itertools import chain
from random import Random
from typing import Any

from bench.bundled.values import BRACKETS, document
from bench.structured import is_nested

# Words in a pair of brackets.
PAIRS = "|".join(
    rf"{re.escape(left)}[\w ,;]*{re.escape(right)}" for left, right in BRACKETS
)
MADE = [document(Random(seed)) for seed in range(2000)]


def objects(value: Any) -> list[dict[str, Any]]:
    """All objects in a value."""
    if isinstance(value, dict):
        return [value, *chain.from_iterable(map(objects, value.values()))]
    return [*chain.from_iterable(map(objects, value))] if isinstance(value, list) else []


def read(text: str) -> Any:
    """A value of JSON, with nothing in it twice; None for what is none."""
    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        return None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_each_is_json_or_words_in_brackets() -> None:
    known = [read(text) for text in MADE]
    brackets = [text for text, value in zip(MADE, known, strict=True) if value is None]
    brackets = [text for text in brackets if text != "null"]
    assert 200 < len(brackets) < 600
    assert all(is_nested(text, PAIRS) for text in brackets)


def test_they_are_short_and_of_many_kinds() -> None:
    every = [one for text in MADE for one in objects(read(text))]
    assert max(map(len, every)) <= 12
    assert sum(map(len, MADE)) / len(MADE) < 200
    assert len(set(MADE)) > 0.8 * len(MADE)
    kinds = {type(value) for one in every for value in one.values()}
    assert kinds == {str, int, float, bool, type(None), list, dict}


def test_a_value_is_a_function_of_its_seed() -> None:
    assert [document(Random(seed)) for seed in range(20)] == MADE[:20]
