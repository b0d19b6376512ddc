"""Searches against brute force; bounds; and that older versions stay what they were."""

import pytest
from attrs import define, field
from hypothesis import example, given
from hypothesis import strategies as st

from minfer.speculate.texts import Match, Texts, _common_length
from minfer.values.log import Log

LEAST = 2
ROOMY = 2**16  # so many slots that no two grams of a tiny language share one
TOKEN = st.integers(0, 2)
TOKENS = st.lists(TOKEN, min_size=1, max_size=9).map(tuple)
# What is written: how far back the text was begun (none: a new one), and what.
WRITING = st.lists(st.tuples(st.none() | st.integers(0, 3), TOKENS), max_size=25)


@define
class Slow:
    """All that `Texts` does, by looking at everything."""

    capacity: int
    texts: dict[int, tuple[int, ...]] = field(factory=dict)
    gone: dict[int, tuple[int, ...]] = field(factory=dict)  # all there ever were
    places: list[tuple[int, int]] = field(factory=list)  # in the order of writing
    next: int = 0

    def extend(self, text: int, tokens: tuple[int, ...]) -> None:
        old = self.texts.get(text)
        if old is None or len(old) + len(tokens) > self.capacity:
            return
        while sum(map(len, self.texts.values())) + len(tokens) > self.capacity:
            del self.texts[min(self.texts)]
        if text not in self.texts:
            return
        self.texts[text] = old + tokens
        ends = range(len(old) + 1, len(old) + len(tokens) + 1)
        self.places += [(text, end) for end in ends if end >= LEAST]
        # What was written of texts that are gone still stands in the chains.
        self.gone = {**self.gone, text: self.texts[text]}

    def found(self, last: tuple[int, ...], candidates: int) -> Match | None:
        if len(last) < LEAST:
            return None
        best, seen = None, 0
        for text, place in reversed(self.places):
            tokens = self.gone[text][:place]
            if tokens[-LEAST:] != last[-LEAST:]:
                continue
            seen += 1
            if seen > candidates or text not in self.texts:
                break
            most = min(len(last), place)
            same = (
                n for n in range(most + 1) if tokens[place - n :] == last[len(last) - n :]
            )
            length = max(same)
            on = place < len(self.texts[text])
            if on and (best is None or length > best.length):
                best = Match(text, place, length)
        return best


def written(
    capacity: int, writing: list[tuple[int | None, tuple[int, ...]]]
) -> tuple[Texts, Slow]:
    texts, slow = Texts(LEAST, capacity), Slow(capacity)
    for back, tokens in writing:
        number = texts.next if back is None else texts.next - 1 - back
        if back is None:
            texts = texts.with_new_text()
            slow.texts[number] = slow.gone[number] = ()
        texts = texts.extended(number, tokens)
        slow.extend(number, tokens)
    return texts, slow


@pytest.mark.long
@given(WRITING, TOKENS, st.integers(1, 6))
@example([(None, (0, 1)), (0, (2, 0)), (0, (1,))], (0, 1), 3)  # grams across writings
def test_what_is_found_is_what_brute_force_finds(
    writing: list[tuple[int | None, tuple[int, ...]]],
    last: tuple[int, ...],
    candidates: int,
) -> None:
    texts, slow = written(ROOMY, writing)
    assert texts.find(last, candidates) == slow.found(last, candidates)
    for number in texts.texts:
        end = texts.last_tokens(number, 5)
        assert end == slow.texts[number][-5:]
        assert texts.find(end, candidates) == slow.found(end, candidates)


@pytest.mark.long
@given(WRITING, TOKENS, st.integers(3, 30))
def test_the_oldest_texts_go(
    writing: list[tuple[int | None, tuple[int, ...]]],
    last: tuple[int, ...],
    capacity: int,
) -> None:
    texts, slow = written(capacity, writing)
    assert {n: tuple(text.tokens) for n, text in texts.texts.items()} == slow.texts
    assert texts.size == sum(map(len, slow.texts.values())) <= capacity
    assert sorted(texts.texts) == list(range(texts.first, texts.next))
    assert len(texts.heads) <= 2 * capacity
    match = texts.find(last, 4)
    if match:  # whatever shares a slot, what is found is there
        tokens = slow.texts[match.text]
        assert match.length >= LEAST
        assert tokens[: match.place][-match.length :] == last[-match.length :]
        assert texts.tokens_after(match, 3) == tokens[match.place : match.place + 3] != ()


@given(WRITING, WRITING, TOKENS)
def test_older_versions_stay_what_they_were(
    one: list[tuple[int | None, tuple[int, ...]]],
    other: list[tuple[int | None, tuple[int, ...]]],
    last: tuple[int, ...],
) -> None:
    texts, slow = written(ROOMY, one)
    newer = texts.with_new_text()
    for back, tokens in other:
        newer = newer.extended(newer.next - 1 - (back or 0), tokens)
    assert texts.find(last, 5) == slow.found(last, 5)
    assert {n: tuple(text.tokens) for n, text in texts.texts.items()} == slow.texts


def test_the_longest_of_the_candidates_wins_and_the_latest_of_equals() -> None:
    texts = (
        Texts(LEAST, ROOMY)
        .with_new_text()
        .extended(0, (7, 1, 2, 5, 8, 1, 2, 6, 8, 1, 2, 4))
    )
    assert texts.find((7, 1, 2), 3) == Match(0, 3, 3)
    assert texts.find((7, 1, 2), 2) == Match(0, 11, 2), "the first was not looked at"
    assert texts.find((8, 1, 2), 3) == Match(0, 11, 3)
    assert texts.find((9, 9, 2), 3) is None
    assert texts.find((2,), 3) is None


def test_nothing_is_found_where_a_text_ends() -> None:
    texts = Texts(LEAST, ROOMY).with_new_text().extended(0, (1, 2))
    assert texts.find((1, 2), 3) is None
    assert texts.extended(0, (3,)).find((1, 2), 3) == Match(0, 2, 2)


def test_no_more_tokens_follow_than_are_asked_for() -> None:
    texts = Texts(LEAST, ROOMY).with_new_text().extended(0, (1, 2, 3, 4, 5))
    assert texts.tokens_after(Match(0, 2, 2), 2) == (3, 4)
    assert texts.tokens_after(Match(0, 2, 2), 9) == (3, 4, 5)


def test_a_text_that_needs_more_than_there_is_stays_as_it_is() -> None:
    texts = Texts(LEAST, 4).with_new_text().extended(0, (1, 2, 3))
    assert texts.extended(0, (4, 5)) is texts
    assert texts.extended(9, (4,)) is texts
    assert texts.extended(0, (4,)).size == 4


def test_a_text_may_push_itself_out() -> None:
    texts = (
        Texts(LEAST, 4)
        .with_new_text()
        .extended(0, (1, 2))
        .with_new_text()
        .extended(1, (1, 2))
    )
    pushed = texts.extended(0, (3,))
    assert sorted(pushed.texts) == [1]
    assert pushed.size == 2


def test_a_gram_may_be_one_token() -> None:
    texts = Texts(1, ROOMY).with_new_text().extended(0, (5, 6, 7))
    assert texts.find((9, 6), 3) == Match(0, 2, 1)


def test_the_table_does_not_grow_beyond_its_slots() -> None:
    texts = Texts(LEAST, 3).with_new_text()
    for token in range(200):
        if texts.size == texts.capacity:
            texts = texts.with_new_text()
        texts = texts.extended(texts.next - 1, (token,))
    assert texts.size <= 3
    assert len(texts.heads) <= 6


def test_a_place_behind_another_token_has_nothing_in_common() -> None:
    """Grams of one token may share a slot."""
    assert _common_length(Log((1, 2, 3)), 2, (9,), 0) == 0
    assert _common_length(Log((1, 2, 3)), 2, (9, 2), 0) == 1
    assert _common_length(Log((1, 2, 3)), 2, (9, 2), 1) == 0
