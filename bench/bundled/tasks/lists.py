"""Short lists: sorted, reversed, counted, and their largest and smallest."""

from random import Random
from typing import Final

from attrs import frozen

from bench.bundled.tasks.problem import Problem, varied
from bench.bundled.tasks.vocabulary import EVERYDAY, NAMES, WORDS, phrases

LONGEST: Final = 8  # items
SORTED: Final = 6  # items, of a list that is put in order
_UP: Final = phrases("lists", "up")
_DOWN: Final = phrases("lists", "down")
_BACK: Final = phrases("lists", "back")
_LARGEST: Final = phrases("lists", "largest")
_SMALLEST: Final = phrases("lists", "smallest")
_COUNT: Final = phrases("lists", "count")


@frozen
class Style:
    """How a list is written; an answer is written as its question is."""

    opens: str
    joint: str
    closes: str
    quote: str

    def write(self, items: list[str] | list[int]) -> str:
        """The list as text."""
        quoted = (
            f"{self.quote}{item}{self.quote}" if isinstance(item, str) else str(item)
            for item in items
        )
        return self.opens + self.joint.join(quoted) + self.closes


_PLAIN: Final = Style("", ", ", "", "")
_STYLES: Final = (
    _PLAIN,
    _PLAIN,
    _PLAIN,
    Style("[", ", ", "]", '"'),
    Style("[", ", ", "]", ""),
    Style("", " ", "", ""),
    Style("[", ", ", "]", "'"),
)


def _items(rng: Random, most_items: int = LONGEST) -> list[str] | list[int]:
    count = min(most_items, rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7, LONGEST)))
    if rng.random() < 0.6:
        most = rng.choice((9, 20, 99, 99, 100, 999))
        if count <= most and rng.random() < 0.8:  # each once
            return rng.sample(range(most + 1), count)
        return [rng.randint(0, most) for _ in range(count)]
    pool = rng.choice((WORDS, EVERYDAY, EVERYDAY, NAMES))
    return rng.sample(pool, min(count, 6))


def _asked(
    rng: Random, forms: tuple[str, ...], items: list[str] | list[int], style: Style
) -> str:
    numbers = isinstance(items[0], int)
    kind = "numbers" if numbers else "words"
    low, high = ("smallest", "largest") if numbers else ("A", "Z")
    form = rng.choice(forms)
    while "number" in form if not numbers else "alphabet" in form:
        form = rng.choice(forms)
    return varied(rng, form.format(x=style.write(items), k=kind, low=low, high=high))


def _key(items: list[str] | list[int]) -> str:
    return " ".join(sorted(map(str, items)))


def _sorted(items: list[str] | list[int], *, down: bool) -> list[str] | list[int]:
    if isinstance(items[0], int):
        return sorted(map(int, items), reverse=down)
    return sorted(map(str, items), reverse=down)


def draw_sort(rng: Random) -> Problem:
    """Two to six numbers up to 999, or words, to be put in order."""
    items, style, down = _items(rng, SORTED), rng.choice(_STYLES), rng.random() < 0.3
    found = style.write(_sorted(items, down=down))
    picks = _sorted(items, down=down)
    first, last = ("largest", "smallest") if down else ("smallest", "largest")
    if isinstance(items[0], str):
        first, last = (
            ("last in the alphabet", "first")
            if down
            else ("first in the alphabet", "last")
        )
    return Problem(
        task="sort",
        key=_key(items),
        question=_asked(rng, _DOWN if down else _UP, items, style),
        answer=found,
        thought=f"The {first} is {picks[0]}, the {last} is {picks[-1]}.",
        truth=found,
    )


def draw_reverse(rng: Random) -> Problem:
    """Two to eight numbers or words to be turned around."""
    items, style = _items(rng), rng.choice(_STYLES)
    found = style.write(items[::-1])
    return Problem(
        task="reverse",
        key=_key(items),
        question=_asked(rng, _BACK, items, style),
        answer=found,
        thought=f"The last is {items[-1]}, so it comes first; {items[0]} comes last.",
        truth=found,
    )


def draw_extreme(rng: Random) -> Problem:
    """The largest or the smallest of some numbers, or how many there are."""
    style = rng.choice(_STYLES)
    count = rng.randint(2, LONGEST)
    most = rng.choice((20, 99, 999))
    items = [rng.randint(0, most) for _ in range(count)]
    match rng.randrange(3):
        case 0:
            forms, answer = _LARGEST, f"The largest is {max(items)}."
        case 1:
            forms, answer = _SMALLEST, f"The smallest is {min(items)}."
        case _:
            forms, answer = _COUNT, f"There are {count}."
    return Problem(
        task="extreme",
        key=_key(items),
        question=_asked(rng, forms, items, style),
        answer=answer,
        truth=answer,
    )
