"""Stop strings against a search letter by letter, in the text as a whole."""

import random
from typing import Any, Self

import pytest

from minfer.effects.text.stops import StopMatcher

ALPHABETS = ["ab\n", "ab", "aé日🙂\u200d\u0301", "a"]


def drawn(draw: random.Random, letters: str, words: int, length: int) -> list[str]:
    """Words of few letters, some made of parts of others: nested, overlapping, equal."""
    stops: list[str] = []
    for _ in range(words):
        word = "".join(draw.choices(letters, k=draw.randrange(1, length + 1)))
        if stops and draw.random() < 0.5:
            earlier = draw.choice(stops)
            place = draw.randrange(len(earlier))
            word = draw.choice(
                [earlier[place:] + word, word + earlier[: place + 1], earlier[place:]]
            )
        stops.append(word[:length])
    return stops


def begun(text: str, words: list[str]) -> str:
    """The longest end of a text that begins a word."""
    ends = (text[start:] for start in range(len(text) + 1))
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
    matcher, text_out, stopped_by, position = StopMatcher(stops), "", None, 0
    while position < len(text) and stopped_by is None:
        step = draw.randrange(4)
        piece, stopped_by = matcher.push(text[position : position + step])
        text_out, position = text_out + piece, position + step
        if (
            stopped_by is None
        ):  # only what may begin a stop string is held back, and all that
            assert text[len(text_out) : position] == begun(text[:position], stops)
            assert searched(text[:position], stops)[1] is None
    if stopped_by is None:
        text_out += matcher.push("", final=True)[0]
    assert (text_out, stopped_by) == searched(text, stops)


@pytest.mark.parametrize("seed", range(100))
def test_stop_strings_that_are_kept_against_search(seed: int) -> None:
    """Nothing is held back, and the text ends with the stop string that was found."""
    draw = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    text = "".join(draw.choices(letters, k=draw.randrange(60)))
    stops = drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))
    matcher, text_out, stopped_by, position = (
        StopMatcher(stops, keep_stops=True),
        "",
        None,
        0,
    )
    while position < len(text) and stopped_by is None:
        step = draw.randrange(4)
        piece, stopped_by = matcher.push(text[position : position + step])
        text_out, position = text_out + piece, position + step
        assert stopped_by or text_out == text[:position]
    before, stop = searched(text, stops)
    assert matcher.push("", final=True) == ("", None)
    assert (text_out, stopped_by) == (before + (stop or ""), stop)


@pytest.mark.parametrize("seed", range(300))
def test_where_none_may_end_one_may_begin(seed: int) -> None:
    draw = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    text = "".join(draw.choices(letters, k=draw.randrange(40)))
    stops = drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))
    free, keep_stops = draw.randrange(len(text) + 1), seed % 3 == 0
    matcher, text_out, position = StopMatcher(stops, keep_stops=keep_stops), "", 0
    while position < free:
        step = min(1 + draw.randrange(4), free - position)
        text_out, position = (
            text_out + matcher.push_without_stop(text[position : position + step]),
            position + step,
        )
    rest, stopped_by = matcher.push(text[free:], final=True)
    for end in range(free + 1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(complete, key=len)
            assert (text_out + rest, stopped_by) == (
                text[: end - (not keep_stops) * len(stop)],
                stop,
            )
            return
    assert (text_out + rest, stopped_by) == (text, None)


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
        counted = super().__new__(cls, text)
        counted.compared = 0
        return counted

    def startswith(self, *args: Any) -> bool:
        self.compared += 1
        return super().startswith(*args)


LETTERS = "".join(random.Random(1).choices("ab", k=2000)) + "ab" * 500 + "a" * 1000
NEAR = {
    "beginnings that are all over the text": [
        LETTERS[position * 40 : position * 40 + 1023] + "c" for position in range(64)
    ],
    "one letter that differs": [
        "a" * position + "b" + "a" * (1023 - position) for position in range(500, 1012, 8)
    ],
    "the last letter": ["a" * 1000 + f"{position:024b}" for position in range(64)],
}


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("text", [LETTERS * 3, "a" * 8000, ("a" * 900 + "c") * 8])
def test_near_matches_are_looked_for_twice_a_letter_at_most(name: str, text: str) -> None:
    stops = [Counted(stop) for stop in NEAR[name]]
    assert {len(stop) for stop in stops} == {1024}
    matcher, text_out = StopMatcher(stops), ""
    for position in range(0, len(text), 4):
        new, stopped_by = matcher.push(text[position : position + 4])
        assert stopped_by is None
        text_out += new
    assert text[len(text_out) :] == begun(text[-1023:], NEAR[name])
    assert sum(stop.compared for stop in stops) <= 2 * len(text)
