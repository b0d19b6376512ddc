"""JSON out of a sentence: who, how old, where; what, how many, when."""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

from attrs import frozen

from bench.bundled.tasks.problem import Problem, syllables
from bench.bundled.tasks.vocabulary import (
    COLORS,
    JOBS,
    MONTHS,
    NAMES,
    PHRASES,
    PLACES,
    THINGS,
    WEEKDAYS,
    WORDS,
    phrases,
)

Values = Mapping[str, Any]


@frozen
class Kind:
    """Sentences about one kind of thing, and the fields that they have."""

    make: Callable[[Random], Values]
    sentences: tuple[str, ...]
    also: Mapping[str, Sequence[str]]  # other names of a field


def _name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else syllables(rng)


def _place(rng: Random) -> str:
    return rng.choice(PLACES) if rng.random() < 0.7 else syllables(rng)


def _person(rng: Random) -> Values:
    return {
        "name": _name(rng),
        "age": rng.randint(1, 99),
        "city": _place(rng),
        "job": rng.choice(JOBS),
    }


def _order(rng: Random) -> Values:
    count, price = rng.randint(2, 99), rng.randint(1, 200)
    return {
        "item": rng.choice(THINGS),
        "quantity": count,
        "price": price,
        "customer": _name(rng),
    }


def _event(rng: Random) -> Values:
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    when = f"{rng.randint(0, 23)}:{rng.choice((0, 15, 30, 45)):02}"
    title = rng.choice(
        (
            "meeting",
            "concert",
            "party",
            "lecture",
            "dinner",
            "workshop",
            "game",
            "exam",
            "wedding",
        )
    )
    return {"event": title, "date": date, "time": when, "place": _place(rng)}


def _contact(rng: Random) -> Values:
    name = _name(rng)
    domain = rng.choice(
        (
            "example.com",
            "mail.org",
            f"{rng.choice(WORDS)}.com",
            f"{rng.choice(WORDS)}.net",
        )
    )
    phone = f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return {"name": name, "email": f"{name.lower()}@{domain}", "phone": phone}


def _product(rng: Random) -> Values:
    return {
        "product": rng.choice(WORDS),
        "color": rng.choice(COLORS),
        "price": rng.randint(1, 500),
        "stock": rng.randint(0, 99),
    }


def _trip(rng: Random) -> Values:
    return {
        "name": _name(rng),
        "from": _place(rng),
        "to": _place(rng),
        "day": rng.choice(WEEKDAYS),
    }


_MAKERS: Final[Mapping[str, Callable[[Random], Values]]] = {
    "person": _person,
    "order": _order,
    "event": _event,
    "contact": _contact,
    "product": _product,
    "trip": _trip,
}
_KINDS: Final = tuple(
    Kind(_MAKERS[one["name"]], tuple(one["sentences"]), one["also"])
    for one in PHRASES["extraction"]["kinds"]
)
_ASKED: Final = phrases("extraction", "asked")
_UNNAMED: Final = phrases("extraction", "unnamed")


def _listed(rng: Random, names: list[str]) -> str:
    style = rng.randrange(3)
    if len(names) == 1 or style == 0:
        return ", ".join(names)
    if style == 1:
        return ", ".join(names[:-1]) + f" and {names[-1]}"
    return ", ".join(f'"{name}"' for name in names)


def draw_extraction(rng: Random) -> Problem:
    """A sentence whose fields are to be put into a JSON object."""
    kind = rng.choice(_KINDS)
    values = kind.make(rng)
    form = rng.choice(kind.sentences)
    there = sorted(
        (name for name in values if f"{{{name}}}" in form),
        key=lambda name: form.index(f"{{{name}}}"),
    )
    sentence = form.format(**values)
    if rng.random() < 0.3:  # in the order in which they come, under their plain names
        found = {name: values[name] for name in there}
        question = rng.choice(_UNNAMED).format(s=sentence)
    else:
        chosen = rng.sample(
            there, rng.choice((len(there), len(there), rng.randint(1, len(there))))
        )
        keys = {rng.choice(kind.also[name]): values[name] for name in chosen}
        found = keys
        question = rng.choice(_ASKED).format(f=_listed(rng, list(keys)), s=sentence)
    answer = json.dumps(found, ensure_ascii=False)
    return Problem(
        task="extraction",
        key=" ".join(map(str, values.values())),
        question=question,
        answer=answer,
        thought="; ".join(f"{name} is {value}" for name, value in found.items()) + ".",
        truth=answer,
    )
