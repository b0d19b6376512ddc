"""Values by a seed: JSON of the kinds that programs write, and words in brackets.

What is to be learnt of them is that they end. No object has a name twice, lists are
short, so are texts and numbers; and whatever was opened is closed, the sooner the deeper
it is. A small model that is held to a schema chooses among what that allows: whether one
more property follows is left to the model, and one that has only seen Python goes on for
ever.
"""

import json
import string
import uuid
from collections.abc import Callable
from random import Random
from typing import Any, Final

from bench.bundled.tasks.problem import syllables
from bench.bundled.tasks.vocabulary import NAMES, PLACES, WORDS

DEEPEST: Final = 4
STYLES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {},
    {},
    {"separators": (",", ":")},
    {"indent": 2},
    {"indent": 4},
    {"indent": 1},
    {"separators": (" , ", " : ")},
)


BRACKETS: Final = (("(", ")"), ("[", "]"), ("{", "}"), ("<", ">"))
DEEPER: Final = (0.45, 0.3, 0.2, 0.1, 0.05)  # how often what is in brackets has its own


def document(rng: Random) -> str:
    """A value as text: mostly an object, indented or not."""
    if rng.random() < 0.2:
        return _brackets(rng)
    made = _object(rng, 0) if rng.random() < 0.75 else _any(rng, 0)
    ascii_only = rng.random() < 0.1
    return json.dumps(made, ensure_ascii=ascii_only, **rng.choice(STYLES))


def _brackets(rng: Random) -> str:
    """Words in brackets of one kind or several, within each other."""
    pairs = rng.sample(BRACKETS, rng.randint(1, 3))
    between = rng.choice((",", ",", ", ", " ", "; "))
    word = rng.choice((_letters_only, _letters_only, _digits, _answer))

    def within(depth: int) -> str:
        left, right = rng.choice(pairs)
        share = DEEPER[min(depth, len(DEEPER) - 1)]
        parts = [
            within(depth + 1) if rng.random() < share else word(rng)
            for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
        ]
        return left + between.join(parts) + right

    return within(0)


def _letters_only(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6)))


def _digits(rng: Random) -> str:
    return str(rng.randint(0, rng.choice((9, 99, 9999))))


def _answer(rng: Random) -> str:
    return rng.choice(("yes", "no", "true", "false", "x"))


def _any(rng: Random, depth: int) -> Any:
    inner = (_object, _list, _tree) if depth < DEEPEST else ()
    leaves = (_text, _text, _number, _number, _word_of_json)
    kinds: tuple[Callable[[Random, int], Any], ...] = (*leaves, *inner)
    return rng.choice(kinds)(rng, depth)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.25:
        return _table(rng, depth)
    count = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6))
    names = dict.fromkeys(_name(rng) for _ in range(count))
    made = {name: _any(rng, depth + 1) for name in names}
    if rng.random() < 0.2:  # some properties that others added
        made |= _table(rng, depth + 1)
    return made


def _table(rng: Random, _: int) -> dict[str, Any]:
    """Names of one form, each with a value of the same kind: nothing but names tells them
    apart.
    """
    begin = rng.choice(("x_", "x-", "", "", "id_", "$", "data-", "k"))
    most = rng.choice((1, 3, 6))
    names = {
        begin + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, most)))
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))
    }
    kind = rng.choice((_digit, _digit, _number, _text))
    return {name: kind(rng, DEEPEST) for name in sorted(names)}


def _list(rng: Random, depth: int) -> list[Any]:
    count = rng.choice((0, 1, 1, 2, 2, 3, 4))
    if rng.random() < 0.3:
        return [_any(rng, depth + 1) for _ in range(count)]
    kind = rng.choice((_object, _text, _number)) if depth < DEEPEST - 1 else _number
    return [kind(rng, depth + 1) for _ in range(count)]


def _tree(rng: Random, depth: int) -> dict[str, Any]:
    """A value, and trees below it: fewer, the deeper they are."""
    value, below = rng.choice((("leaf", "below"), ("value", "children"), ("id", "items")))
    made = {value: _any(rng, depth + 2)}
    if rng.random() < 0.7:
        most = max(0, DEEPEST - 1 - depth)
        count = rng.randint(0, min(2, most))
        made[below] = [_tree(rng, depth + 1) for _ in range(count)]
    return made


def _name(rng: Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.choice((1, 1, 1, 2)))]
    match rng.randrange(8):
        case 0:
            return words[0] + "".join(word.capitalize() for word in words[1:])
        case 1:
            return rng.choice(("id", "name", "size", "kind", "ok", "next", "é", "größe"))
        case _:
            return "_".join(words)


def _digit(rng: Random, _: int) -> int:
    return rng.randint(0, 9)


def _number(rng: Random, _: int) -> int | float:
    match rng.randrange(6):
        case 0:
            return round(rng.uniform(-100, 1000), rng.randint(1, 2))
        case 1:
            return -rng.randint(1, 99)
        case 2:
            return rng.randint(0, 9)
        case _:
            return rng.randint(0, rng.choice((20, 100, 600, 5000)))


def _word_of_json(rng: Random, _: int) -> bool | None:
    return rng.choice((True, False, None))


def _text(rng: Random, _: int) -> str:
    return rng.choice(_TEXTS)(rng)


def _words(rng: Random) -> str:
    return " ".join(rng.sample(WORDS, rng.choice((1, 1, 1, 2, 3, 5))))


def _letters(rng: Random) -> str:
    letters = rng.choice((string.ascii_lowercase, string.ascii_letters + string.digits))
    return "".join(rng.choices(letters, k=rng.randint(0, 9)))


def _somebody(rng: Random) -> str:
    return rng.choice((rng.choice(NAMES), rng.choice(PLACES), syllables(rng)))


def _date(rng: Random) -> str:
    year, month, day = rng.randint(1990, 2030), rng.randint(1, 12), rng.randint(1, 28)
    return f"{year}-{month:02}-{day:02}"


def _time(rng: Random) -> str:
    zone = rng.choice(("Z", "+01:00", "-05:00"))
    hour, minute, second = rng.randint(0, 23), rng.randint(0, 59), rng.randint(0, 59)
    return f"{hour:02}:{minute:02}:{second:02}{zone}"


def _uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _address(rng: Random) -> str:
    return ".".join(str(rng.randint(0, 255)) for _ in range(4))


def _mail(rng: Random) -> str:
    return f"{rng.choice(WORDS)}@{rng.choice(WORDS)}.{rng.choice(('com', 'org', 'net'))}"


def _version(rng: Random) -> str:
    return f"v{rng.randint(0, 20)}.{rng.randint(0, 99)}"


def _path(rng: Random) -> str:
    verb = rng.choice(("", "", "GET ", "PUT ", "POST "))
    return f"{verb}/{'/'.join(rng.sample(WORDS, rng.randint(1, 2)))}"


def _with_signs(rng: Random) -> str:
    forms = ("#{w}", "{w}\n", '"{w}"', "{w}\t{w}", "é{w}", "{w}: {w}", "({w})", "{w}.py")
    return rng.choice(forms).format(w=rng.choice(WORDS))


_TEXTS: Final[tuple[Callable[[Random], str], ...]] = (
    _words,
    _words,
    _words,
    _letters,
    _letters,
    _somebody,
    _date,
    _time,
    _uuid,
    _address,
    _mail,
    _version,
    _path,
    _with_signs,
)
