"""Masks in lines, and tokens that lines may not allow."""

import numpy as np
import pytest

from minfer.effects.text.grammars.mask_lines import (
    MAX_BANS,
    NUM_FIRST_WORDS,
    WORD_BITS,
    BannedTokens,
    Lines,
    TokenBans,
    bits_of,
    fill,
)

WORDS = NUM_FIRST_WORDS + 2


def lines_of(*allowed: set[int]) -> Lines:
    bits = np.zeros((len(allowed), WORD_BITS * WORDS), np.uint8)
    for line, tokens in zip(bits, allowed, strict=True):
        line[list(tokens)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def allowed(lines: Lines) -> list[set[int]]:
    bits = np.unpackbits(lines.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(line).tolist()) for line in bits]


@pytest.mark.parametrize("size", [0, 3, 4 * WORDS, 4 * WORDS + 4])
def test_a_mask_is_written_as_far_as_it_goes_and_nothing_else_is_allowed(
    size: int,
) -> None:
    lines = np.full((2, WORDS), 7, np.int32)
    fill(lines[1], b"\xff" * size)
    assert allowed(lines)[1] == set(range(8 * min(size, 4 * WORDS)))
    assert (lines[0] == 7).all()
    assert bits_of(lines[1])[:size] == b"\xff" * min(size, 4 * WORDS)


LAST = WORD_BITS * WORDS - 1


@pytest.mark.parametrize(
    ("before", "after", "empty"),
    [
        ([{1}, {2}], [{1}, {2}], []),
        ([{1, 31}, {2, 64}], [{1}, {2}], []),
        ([{31}, {2, 31}], [set(), {2}], [0]),
        ([{1}, {31, 30, 64, LAST}], [{1}, set()], [1]),
        ([{31, LAST - 1}, {64}], [{LAST - 1}, set()], [1]),  # far behind the first
    ],
)
def test_banned_tokens_are_cleared_and_empty_lines_are_returned(
    before: list[set[int]], after: list[set[int]], empty: list[int]
) -> None:
    bars = BannedTokens.of([30, 31, 64, LAST, LAST + 1, 10**6], WORDS)
    everything = set(range(WORD_BITS * WORDS))
    lines = lines_of(everything, *before, everything)
    assert bars.clear(lines, [1, 2]) == [line + 1 for line in empty]
    assert allowed(lines) == [everything, *after, everything]


def test_of_tokens_that_no_line_has_nothing_is_cleared() -> None:
    lines = lines_of({1}, set())
    assert BannedTokens.of([10**6], WORDS).clear(lines, [0, 1]) == []
    assert allowed(lines) == [{1}, set()]


def test_lines_are_barred_from_tokens_of_their_own() -> None:
    bans = TokenBans()
    for _ in range(2):
        lines = lines_of({1, 2}, {1, 2}, {1}, {1, 2})
        barred = {frozenset({1}): [0, 2], frozenset({2}): [3], frozenset[int](): [1]}
        assert bans.clear(lines, barred) == {2}
        assert allowed(lines) == [{2}, {1, 2}, set(), {1}]
    narrow = np.full((1, 1), -1, np.int32)
    assert bans.clear(narrow, {frozenset({1, 40}): [0]}) == set()
    assert allowed(narrow) == [set(range(32)) - {1}]


def test_no_more_sets_of_tokens_are_kept_than_have_room() -> None:
    bans = TokenBans()
    for token in range(3 * MAX_BANS):
        lines = lines_of({token % 64, 70})
        bans.clear(lines, {frozenset({token % 64, 1000 + token}): [0]})
        assert allowed(lines) == [{70}]
        assert len(bans._bans) <= MAX_BANS
