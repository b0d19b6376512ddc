"""Tools that are offered, how people ask for them, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

from attrs import field, frozen

from bench.bundled.tasks.problem import syllables
from bench.bundled.tasks.vocabulary import (
    COLORS,
    NAMES,
    PLACES,
    SUBJECTS,
    THINGS,
    TOOLS,
    WEEKDAYS,
    WORDS,
)

Values = Mapping[str, Any]


@frozen
class Tool:
    """A function, questions that need it, and answers made of its result.

    A field's type is a JSON type. Questions and answers are formats over arguments and
    results.
    """

    names: Sequence[str]
    about: str
    fields: Mapping[str, tuple[str, str]]  # name -> type, description
    make: Callable[[Random], Values]
    result: Callable[[Random, Values], Values]
    asked: Sequence[str]
    answers: Sequence[str]
    also: Mapping[str, Sequence[str]] = field(factory=dict)  # other names of a field
    choices: Mapping[str, Sequence[str]] = field(factory=dict)


def _place(rng: Random) -> str:
    return rng.choice(PLACES) if rng.random() < 0.75 else syllables(rng)


def _name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else syllables(rng)


def _word(rng: Random) -> str:
    return rng.choice(WORDS)


def _words(rng: Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 4)))


def _clock(rng: Random) -> str:
    minute = rng.choice((0, 5, 10, 15, 20, 30, 45, rng.randint(0, 59)))
    return f"{rng.randint(0, 23):02}:{minute:02}"


def _expression(rng: Random) -> str:
    return f"{_any(rng, 9999) + 1} {rng.choice('+-*/')} {_any(rng, 999)}"


def _any(rng: Random, most: int) -> int:
    """Small numbers as often as large ones: a tool that adds is called for 2 + 2, too."""
    return rng.randint(0, min(most, rng.choice((9, 99, 999, 99999))))


def _done(rng: Random, values: Values) -> Values:  # noqa: ARG001 - as every result
    return {"status": "ok"}


_SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")
_DOMAINS: Final = ("example.com", "mail.org", "work.net")
_UNITS: Final = ("celsius", "fahrenheit")
# Of each tool of tools.toml: arguments for it, and what comes of them.
_MAKERS: Final[
    Mapping[str, tuple[Callable[[Random], Values], Callable[[Random, Values], Values]]]
] = {
    "get_weather": (
        lambda rng: {"city": _place(rng)},
        lambda rng, _: {"temperature": rng.randint(-10, 38), "sky": rng.choice(_SKIES)},
    ),
    "weather_in_unit": (
        lambda rng: {"city": _place(rng), "unit": rng.choice(_UNITS)},
        lambda rng, _: {
            "temperature": rng.randint(-10, 99),
            "condition": rng.choice(_SKIES),
        },
    ),
    "get_time": (lambda rng: {"city": _place(rng)}, lambda rng, _: {"time": _clock(rng)}),
    "add": (
        lambda rng: {"a": _any(rng, 99999), "b": _any(rng, 99999)},
        lambda _, v: {"result": v["a"] + v["b"]},
    ),
    "multiply": (
        lambda rng: {"a": _any(rng, 9999), "b": _any(rng, 999)},
        lambda _, v: {"result": v["a"] * v["b"]},
    ),
    "calculator": (
        lambda rng: {"expression": _expression(rng)},
        lambda rng, _: {"result": rng.randint(1, 99999)},
    ),
    "send_email": (
        lambda rng: {
            "to": f"{_name(rng).lower()}@{rng.choice(_DOMAINS)}",
            "subject": _words(rng),
        },
        _done,
    ),
    "send_message": (lambda rng: {"name": _name(rng), "text": _words(rng)}, _done),
    "search": (
        lambda rng: {"query": rng.choice((rng.choice(SUBJECTS), _words(rng)))},
        lambda rng, _: {"results": rng.randint(1, 200)},
    ),
    "get_stock_price": (
        lambda rng: {
            "symbol": "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVXZ", k=rng.randint(3, 4)))
        },
        lambda rng, _: {"price": round(rng.uniform(1, 900), 2)},
    ),
    "set_alarm": (lambda rng: {"time": _clock(rng)}, _done),
    "set_timer": (lambda rng: {"minutes": rng.randint(1, 120)}, _done),
    "convert_currency": (
        lambda rng: dict(
            zip(
                ("amount", "source", "target"),
                (
                    rng.randint(1, 999),
                    *rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "INR"), 2),
                ),
                strict=True,
            )
        ),
        lambda rng, _: {"amount_converted": round(rng.uniform(1, 2000), 2)},
    ),
    "translate": (
        lambda rng: {
            "text": _words(rng),
            "language": rng.choice(
                ("French", "German", "Spanish", "Italian", "Greek", "Polish")
            ),
        },
        lambda rng, _: {
            "translation": f"{syllables(rng).lower()} {syllables(rng).lower()}"
        },
    ),
    "create_event": (
        lambda rng: {
            "title": rng.choice(
                ("dinner", "meeting", "lunch", "tennis", "yoga", _word(rng))
            ),
            "day": rng.choice(WEEKDAYS),
            "time": _clock(rng),
        },
        _done,
    ),
    "turn_on": (
        lambda rng: {
            "room": rng.choice(
                (
                    "kitchen",
                    "bedroom",
                    "hall",
                    "garden",
                    "bathroom",
                    "office",
                    "garage",
                    _word(rng),
                )
            )
        },
        _done,
    ),
    "set_temperature": (
        lambda rng: {
            "room": rng.choice(("kitchen", "bedroom", "office", "bathroom", _word(rng))),
            "degrees": rng.randint(5, 30),
        },
        _done,
    ),
    "play_song": (lambda rng: {"title": _words(rng), "artist": _name(rng)}, _done),
    "get_user": (
        lambda rng: {"id": rng.randint(1, 99999)},
        lambda rng, _: {"name": _name(rng), "city": _place(rng)},
    ),
    "order_item": (
        lambda rng: {"item": rng.choice(THINGS), "quantity": rng.randint(1, 99)},
        lambda rng, _: {"order": rng.randint(100, 9999)},
    ),
    "read_file": (
        lambda rng: {
            "path": f"{_word(rng)}.{rng.choice(('txt', 'py', 'md', 'json', 'csv'))}"
        },
        lambda rng, _: {"lines": rng.randint(1, 900)},
    ),
    "roll_dice": (
        lambda rng: {"sides": rng.choice((6, 6, 10, 20, 100, rng.randint(2, 999)))},
        lambda rng, v: {"number": rng.randint(1, v["sides"])},
    ),
    "get_distance": (
        lambda rng: {"start": _place(rng), "end": _place(rng)},
        lambda rng, _: {"km": rng.randint(10, 9999)},
    ),
    "book_table": (
        lambda rng: {
            "people": rng.randint(1, 12),
            "time": _clock(rng),
            "name": _name(rng),
        },
        lambda rng, _: {"table": rng.randint(1, 40)},
    ),
    "paint": (lambda rng: {"thing": _word(rng), "color": rng.choice(COLORS)}, _done),
}
CATALOGUE: Final = tuple(
    Tool(
        names=tuple(one["names"]),
        about=one["about"],
        fields={
            name: (each["type"], each["description"])
            for name, each in one["fields"].items()
        },
        make=_MAKERS[name][0],
        result=_MAKERS[name][1],
        asked=tuple(one["asked"]),
        answers=tuple(one["answers"]),
        also=one.get("also", {}),
        choices=one.get("choices", {}),
    )
    for name, one in TOOLS.items()
)
