"""JSON out of a sentence: who, how old, where; what, how many, when."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from attrs import frozen

from bench.bundled.tasks.problem import Problem, syllables
from bench.bundled.tasks.vocabulary import COLORS, JOBS, MONTHS, NAMES, PLACES, THINGS, WEEKDAYS, WORDS

Values = Mapping[str, Any]


@frozen
class Kind:
    """Sentences about one kind of thing, and the fields that they have."""

    make: Callable[[Random], Values]
    sentences: tuple[str, ...]
    also: Mapping[str, tuple[str, ...]]  # other names of a field


def _name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else syllables(rng)


def _place(rng: Random) -> str:
    return rng.choice(PLACES) if rng.random() < 0.7 else syllables(rng)


def _person(rng: Random) -> Values:
    return {"name": _name(rng), "age": rng.randint(1, 99), "city": _place(rng), "job": rng.choice(JOBS)}


def _order(rng: Random) -> Values:
    count, price = rng.randint(2, 99), rng.randint(1, 200)
    return {"item": rng.choice(THINGS), "quantity": count, "price": price, "customer": _name(rng)}


def _event(rng: Random) -> Values:
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    when = f"{rng.randint(0, 23)}:{rng.choice((0, 15, 30, 45)):02}"
    title = rng.choice(("meeting", "concert", "party", "lecture", "dinner", "workshop", "game", "exam", "wedding"))
    return {"event": title, "date": date, "time": when, "place": _place(rng)}


def _contact(rng: Random) -> Values:
    name = _name(rng)
    domain = rng.choice(("example.com", "mail.org", f"{rng.choice(WORDS)}.com", f"{rng.choice(WORDS)}.net"))
    phone = f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return {"name": name, "email": f"{name.lower()}@{domain}", "phone": phone}


def _product(rng: Random) -> Values:
    return {"product": rng.choice(WORDS), "color": rng.choice(COLORS), "price": rng.randint(1, 500), "stock": rng.randint(0, 99)}


def _trip(rng: Random) -> Values:
    return {"name": _name(rng), "from": _place(rng), "to": _place(rng), "day": rng.choice(WEEKDAYS)}


_KINDS: Final = (
    Kind(_person, (
        "{name} is {age} years old and lives in {city}.", "{name} is {age} and lives in {city}.",
        "My name is {name}, I am {age} years old and I live in {city}.",
        "{name}, {age}, is a {job} from {city}.", "{name} ({age}) works as a {job} in {city}.",
        "In {city} lives {name}, a {job} who is {age} years old.",
        "{name} from {city} is a {age} year old {job}.", "I am {name}, {age}, from {city}.",
        "{name} is {age} years old.", "{name} lives in {city}.", "{name} is a {job} in {city}.",
        "This is {name}. {name} is {age} and works as a {job}.", "{name} is a {job}.",
     ), {"name": ("name", "name", "person", "first_name"), "city": ("city", "city", "town", "location"),
         "job": ("job", "profession", "occupation"), "age": ("age",)}),
    Kind(_order, (
        "{customer} bought {quantity} {item} for {price} euros.", "{customer} orders {quantity} {item}.",
        "I would like to order {quantity} {item} for {price} dollars.", "{quantity} {item} cost {price} dollars.",
        "Please send {quantity} {item} to {customer}.", "{customer} paid {price} dollars for {quantity} {item}.",
     ), {"item": ("item", "product"), "quantity": ("quantity", "count", "amount"), "price": ("price", "total"),
         "customer": ("customer", "name", "buyer")}),
    Kind(_event, (
        "The {event} is on {date} at {time} in {place}.", "The {event} takes place in {place} on {date}.",
        "There is a {event} on {date} at {time}.", "Come to the {event} in {place} on {date} at {time}!",
        "On {date} at {time} there will be a {event} in {place}.", "Our {event} starts at {time}.",
     ), {"event": ("event", "title"), "date": ("date", "day"), "time": ("time", "start"), "place": ("place", "city", "location")}),
    Kind(_contact, (
        "You can reach {name} at {email} or {phone}.", "{name}'s email is {email}.", "{name}, phone {phone}, email {email}",
        "Contact: {name}, {email}", "Call {name} at {phone}.", "Write to {name} at {email} or call {phone}.",
     ), {"name": ("name", "contact"), "email": ("email", "mail"), "phone": ("phone", "number")}),
    Kind(_product, (
        "The {color} {product} costs {price} euros.", "We have {stock} of the {product} in {color} for {price} dollars.",
        "A {product} in {color} is {price} dollars.", "There are {stock} {color} ones of the {product} left.",
     ), {"product": ("product", "item", "name"), "color": ("color",), "price": ("price", "cost"), "stock": ("stock", "count")}),
    Kind(_trip, (
        "{name} travels from {from} to {to} on {day}.", "On {day} {name} flies from {from} to {to}.",
        "{name} takes the train from {from} to {to}.", "{name} goes to {to} on {day}.",
     ), {"name": ("name", "passenger", "traveler"), "from": ("from", "origin"), "to": ("to", "destination"), "day": ("day", "date")}),
)  # fmt: skip
_ASKED: Final = (
    "Extract the {f} as JSON: {s}", "Extract {f} as JSON from: {s}", "Give me {f} as JSON: {s}",
    "{s} Extract {f} as JSON.", "{s} Write {f} as a JSON object.", 'Extract {f} as JSON from "{s}"',
    "Return JSON with {f}: {s}", "Read this and answer in JSON with the keys {f}: {s}",
    "Extract JSON with the keys {f} from this sentence: {s}", "JSON with {f} from this text: {s}",
    "{s}\nAnswer with JSON: {f}", "Turn this into JSON with {f}. {s}",
)  # fmt: skip
_UNNAMED: Final = (
    "Extract JSON: {s}", "{s} As JSON, please.", "Turn this sentence into JSON: {s}", "{s}\nWrite this as JSON.",
    "Extract the data as JSON: {s}", "Extract the facts as JSON: {s}", 'Convert "{s}" to JSON.',
)  # fmt: skip


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
    there = sorted((name for name in values if f"{{{name}}}" in form), key=lambda name: form.index(f"{{{name}}}"))
    sentence = form.format(**values)
    if rng.random() < 0.3:  # in the order in which they come, under their plain names
        found = {name: values[name] for name in there}
        question = rng.choice(_UNNAMED).format(s=sentence)
    else:
        chosen = rng.sample(there, rng.choice((len(there), len(there), rng.randint(1, len(there)))))
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
