"""Words in texts, letter by letter, against looking for each of them everywhere."""

import random
from collections.abc import Iterator
from typing import Self

import pytest

from minfer.effects.text.automaton import ROOT, Automaton


class Counted(str):
    """Letters that count how often one of them is looked at."""

    __slots__ = ("looks",)

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.looks = 0
        return made

    def __getitem__(self, at: object) -> str:
        self.looks += 1
        return super().__getitem__(at)  # type: ignore[index]  # whatever a string takes

    looks: int


def drawn(draw: random.Random, letters: str, words: int, length: int) -> list[str]:
    """Words of few letters, some made of parts of others: nested, overlapping, equal."""
    made: list[str] = []
    for _ in range(words):
        word = "".join(draw.choices(letters, k=draw.randrange(1, length + 1)))
        if made and draw.random() < 0.5:
            other = draw.choice(made)
            at = draw.randrange(len(other))
            word = draw.choice([other[at:] + word, word + other[: at + 1], other[at:]])
        made.append(word[:length])
    return made


def begun(text: str, words: list[str]) -> str:
    """The longest end of a text that begins a word."""
    ends = (text[at:] for at in range(len(text) + 1))
    return next(end for end in ends if any(word.startswith(end) for word in words))


def states(words: Automaton, text: str) -> Iterator[int]:
    state = ROOT
    for letter in text:
        state = words.read(state, letter).state
        yield state


@pytest.mark.parametrize("seed", range(200))
def test_a_state_is_the_longest_end_that_begins_a_word(seed: int) -> None:
    draw = random.Random(seed)
    given = drawn(draw, "ab" if seed % 2 else "abcé🙂\0", draw.randrange(1, 8), 9)
    words = Automaton(given)
    for _ in range(8):  # later texts find what earlier ones left behind
        text = "".join(draw.choices("ab" if seed % 2 else "abcé🙂\0", k=30))
        for at, state in enumerate(states(words, text), 1):
            assert words.length(state) == len(begun(text[:at], given))
            ending = [word for word in given if text[:at].endswith(word)]
            assert words.ends.get(state) == max(ending, key=len, default=None)
            if ending:
                break


@pytest.mark.parametrize("seed", range(50))
def test_reading_at_once_stops_where_the_first_word_ends(seed: int) -> None:
    draw = random.Random(seed)
    given = drawn(draw, "abc", 4, 5)
    text = "".join(draw.choices("abcd", k=40))
    words = Automaton(given)
    place = words.read(ROOT, text)
    ends = [
        text.find(word, at) + len(word)
        for word in given
        for at in range(len(text))
        if word in text[at:]
    ]
    assert place.read == min(ends, default=len(text))
    assert (place.state in words.ends) == bool(ends)


def test_the_words_of_the_picture() -> None:
    words = Automaton(["abc", "abd", "bd"])
    assert [*states(words, "ab")] == [1, 2]
    assert [*states(words, "abd")][-1] == 4
    assert [*states(words, "bd")] == [5, 6]
    assert words.ends == {3: "abc", 4: "abd", 6: "bd"}
    assert [*map(words.length, range(7))] == [0, 1, 2, 3, 3, 1, 2]


def test_what_begins_with_another_word_is_left_out() -> None:
    words = Automaton(["ab", "abc", "abb", "ab"])
    assert words.ends == {2: "ab"}


@pytest.mark.parametrize("words", [[], [""], ["a", ""]])
def test_there_is_something_to_look_for(words: list[str]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Automaton(words)


TEXT = "".join(random.Random(1).choices("ab", k=2000)) + "ab" * 500 + "a" * 1000


@pytest.mark.parametrize("count", [1, 64])
def test_a_letter_is_looked_at_as_often_for_many_words_as_for_one(count: int) -> None:
    given = [TEXT[at * 40 : at * 40 + 900] + "c" for at in range(count)]
    words = Automaton(given)
    letters = words._letters = Counted(words._letters)
    text = TEXT * 20
    assert words.read(ROOT, text).read == len(text)
    states_there_are = len(letters)
    # Two for each letter of the text, and, once for all texts, for each link.
    assert letters.looks <= 2 * len(text) + 2 * states_there_are


def test_what_is_kept_of_words_is_bounded_whatever_is_read() -> None:
    given = [TEXT[at * 10 : at * 10 + 1000] + "c" for at in range(64)]
    words = Automaton(given)
    total = sum(map(len, given))
    assert len(words._letters) == len(words._links) <= total + 1
    assert words._links.itemsize == 4
    for begin in range(0, 3000, 7):
        words.read(ROOT, TEXT[begin:])
    assert len(words._links) <= total + 1
    assert len(words._partings) < len(given)
    assert len(words.ends) == len(given)
