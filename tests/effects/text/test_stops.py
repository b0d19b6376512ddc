"""Stop strings against a search letter by letter."""

import random

import pytest

from minfer.effects.text.stops import StopMatcher


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of those, found letter by letter."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings_against_search(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab\n", k=draw.randrange(40)))
    stops = [
        "".join(draw.choices("ab\n", k=draw.randrange(1, 7)))
        for _ in range(draw.randrange(1, 4))
    ]
    matcher, got, found, at = StopMatcher(stops), "", None, 0
    while at < len(text) and found is None:
        step = draw.randrange(4)
        piece, found = matcher.push(text[at : at + step])
        got, at = got + piece, at + step
        if found is None:  # only what may begin a stop string is held back
            held = text[len(got) : at]
            assert held == "" or any(stop.startswith(held) for stop in stops)
            assert searched(text[:at], stops)[1] is None
    if found is None:
        got += matcher.push("", final=True)[0]
    assert (got, found) == searched(text, stops)


def test_stop_strings_may_not_be_empty() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
