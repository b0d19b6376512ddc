"""Stop strings against a search letter by letter, in the text as a whole."""

import random
from weakref import ref

import pytest

from minfer.effects.text.stops import StopMatcher
from tests.effects.text.test_automaton import begun, drawn

ALPHABETS = ["ab\n", "ab", "aé日🙂\u200d\u0301", "a"]


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
    matcher, got, found, at = StopMatcher(stops, kept=True), "", None, 0
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
    stops: list[str] = []  # none of which begins with another one
    for stop in sorted(drawn(draw, letters, draw.randrange(1, 6), draw.randrange(1, 9))):
        if not stops or not stop.startswith(stops[-1]):
            stops.append(stop)
    free, kept = draw.randrange(len(text) + 1), seed % 3 == 0
    matcher, got, at = StopMatcher(stops, kept=kept), "", 0
    while at < free:
        step = min(1 + draw.randrange(4), free - at)
        got, at = got + matcher.pass_by(text[at : at + step]), at + step
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


def test_equal_stop_strings_are_kept_once_and_no_longer_than_used() -> None:
    one, other = (
        StopMatcher(["one stop", "another"]),
        StopMatcher(["another", "one stop"]),
    )
    assert one._stops is other._stops
    assert one.push("ano") == other.push("ano") == ("", None)
    assert one.push("ther") == ("", "another")
    assert other.push("!") == ("ano!", None)  # each is at its own place
    kept = ref(one._stops)
    del one
    assert kept() is not None
    del other
    assert kept() is None
