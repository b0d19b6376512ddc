"""Stop strings against a search letter by letter, in the text as a whole."""

import random
from typing import Any, Self

import pytest

from minfer.effects.text.stops import StopMatcher

ALPHABETS = ["ab\n", "ab", "aé日🙂\u200d\u0301", "a"]


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


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of those, found letter by letter."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(600))
def test_stop_strings_against_search(seed: int) -> None:
    draw = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    text = "".join(draw.choices(letters, k=draw.randrange(60)))
    stops = drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))
    matcher, got, found, at = StopMatcher(stops), "", None, 0
    while at < len(text) and found is None:
        step = draw.randrange(4)
        piece, found = matcher.push(text[at : at + step])
        got, at = got + piece, at + step
        if found is None:  # only what may begin a stop string is held back, and all that
            assert text[len(got) : at] == begun(text[:at], stops)
            assert searched(text[:at], stops)[1] is None
    if found is None:
        got += matcher.push("", final=True)[0]
    assert (got, found) == searched(text, stops)


@pytest.mark.parametrize("seed", range(100))
def test_stop_strings_that_are_kept_against_search(seed: int) -> None:
    """Nothing is held back, and the text ends with the stop string that was found."""
    draw = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    text = "".join(draw.choices(letters, k=draw.randrange(60)))
    stops = drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))
    matcher, got, found, at = StopMatcher(stops, keep_stops=True), "", None, 0
    while at < len(text) and found is None:
        step = draw.randrange(4)
        piece, found = matcher.push(text[at : at + step])
        got, at = got + piece, at + step
        assert found or got == text[:at]
    before, stop = searched(text, stops)
    assert matcher.push("", final=True) == ("", None)
    assert (got, found) == (before + (stop or ""), stop)


@pytest.mark.parametrize("seed", range(300))
def test_where_none_may_end_one_may_begin(seed: int) -> None:
    draw = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    text = "".join(draw.choices(letters, k=draw.randrange(40)))
    stops = drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))
    free, kept = draw.randrange(len(text) + 1), seed % 3 == 0
    matcher, got, at = StopMatcher(stops, keep_stops=kept), "", 0
    while at < free:
        step = min(1 + draw.randrange(4), free - at)
        got, at = got + matcher.push_without_stop(text[at : at + step]), at + step
    more, found = matcher.push(text[free:], final=True)
    for end in range(free + 1, len(text) + 1):
        if there := [one for one in stops if text[:end].endswith(one)]:
            stop = max(there, key=len)
            assert (got + more, found) == (text[: end - (not kept) * len(stop)], stop)
            return
    assert (got + more, found) == (text, None)


def test_a_text_is_found_in_whatever_is_pushed_last() -> None:
    assert StopMatcher(["bc"]).push("abcd", final=True) == ("a", "bc")
    assert StopMatcher(["bc"]).push("ab", final=True) == ("ab", None)


def test_stop_strings_may_not_be_empty() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


class Counted(str):
    """A stop string that counts its comparisons."""

    __slots__ = ("compared",)
    compared: int

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.compared = 0
        return made

    def startswith(self, *what: Any) -> bool:
        self.compared += 1
        return super().startswith(*what)


LETTERS = "".join(random.Random(1).choices("ab", k=2000)) + "ab" * 500 + "a" * 1000
NEAR = {
    "beginnings that are all over the text": [
        LETTERS[at * 40 : at * 40 + 1023] + "c" for at in range(64)
    ],
    "one letter that differs": [
        "a" * at + "b" + "a" * (1023 - at) for at in range(500, 1012, 8)
    ],
    "the last letter": ["a" * 1000 + f"{at:024b}" for at in range(64)],
}


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("text", [LETTERS * 3, "a" * 8000, ("a" * 900 + "c") * 8])
def test_near_matches_are_looked_for_twice_a_letter_at_most(name: str, text: str) -> None:
    stops = [Counted(stop) for stop in NEAR[name]]
    assert {len(stop) for stop in stops} == {1024}
    matcher, given = StopMatcher(stops), ""
    for at in range(0, len(text), 4):
        new, found = matcher.push(text[at : at + 4])
        assert found is None
        given += new
    assert text[len(given) :] == begun(text[-1023:], NEAR[name])
    assert sum(stop.compared for stop in stops) <= 2 * len(text)
