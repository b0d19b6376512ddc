"""Tickets against a plain set."""

import hypothesis.strategies as st
from hypothesis import given

from minfer.values.tickets import add, drop, pop_least, words_of

NUMBERS = st.one_of(st.integers(0, 600), st.integers(0, 2**20), st.integers(0, 2**48 - 1))


@given(st.lists(NUMBERS, max_size=60))
def test_the_least_is_found_whatever_comes_and_goes(numbers: list[int]) -> None:
    here, words = set[int](), words_of(())
    for number in numbers:
        before, draft = words, words.mutate()
        kept = dict(before)
        if number in here:
            drop(draft, number)
        else:
            add(draft, number)
        here ^= {number}
        words = draft.finish()
        assert dict(before) == kept, "the old words have not changed"
        assert words == words_of(here), "whatever made them"
        if here:
            draft = words.mutate()
            assert pop_least(draft) == min(here)
            assert draft.finish() == words_of(here - {min(here)})
    draft = words.mutate()
    for number in sorted(here):
        assert pop_least(draft) == number
    assert not draft.finish(), "empty words are not kept"


def test_a_few_words_hold_many_neighbours() -> None:
    assert len(words_of(range(100 << 12, 104 << 12))) == 4 + 3, (
        "and a word on each level above"
    )
