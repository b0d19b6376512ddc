"""Prompts that are alike but for one token, against a search token by token."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minfer.analysis.near_prefix import OneTokenEdit, num_common, one_token_edit, packed

TOKENS = st.lists(st.integers(0, 2), max_size=24).map(tuple)


def searched(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    different = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(different, min(len(first), len(second)))


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens(
    begin: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    first, second = begin * 3 + a, begin * 3 + b
    assert num_common(packed(first), packed(second)) == searched(first, second)


@given(TOKENS, TOKENS)
def test_an_edit_is_the_best_of_the_three(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    edit, at = one_token_edit(packed(a), packed(b)), searched(a, b)
    assert edit.at == at
    assert edit.alike == max(
        searched(a[at + 1 :], b[at + 1 :]),
        searched(a[at + 1 :], b[at:]),
        searched(a[at:], b[at + 1 :]),
    )


@pytest.mark.parametrize(
    ("tokens", "kind", "alike"),
    [
        ((1, 2, 9, 4, 5), "differs", 2),
        ((1, 2, 9, 3, 4, 5), "is inserted", 3),
        ((1, 2, 4, 5), "is left out", 2),
    ],
)
def test_each_kind_of_edit(tokens: tuple[int, ...], kind: str, alike: int) -> None:
    edit = one_token_edit(packed(tokens), packed((1, 2, 3, 4, 5)))
    assert edit == OneTokenEdit(2, kind, alike)
