"""JSON schemas: which keywords are enforced, and which are refused.

By the standard, an unknown keyword means nothing. Here it is refused: its author expects
an effect. So are known keywords that no mask could enforce; keywords that only comment
are accepted, without an effect.

This looks at keywords alone. What a keyword's value must be, and whether anything can
satisfy the schema, is for the compiler to decide.
"""

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from math import lcm
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.patterns import UNNAMED, rewrite_pattern, unnamed

Number = TypeVar("Number", int, float)
_LONGEST: Final = 32  # digits of a number that an error shows
_VALUES: Final = frozenset(
    {
        *("$ref", "type", "enum", "const", "required", "pattern", "format"),
        *("minLength", "maxLength", "minimum", "maximum", "multipleOf"),
        *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
        *("minProperties", "maxProperties"),
    }
)
_SCHEMA: Final = frozenset({"additionalProperties", "additionalItems", "items"})
_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NAMED: Final = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_COMMENTS: Final = frozenset(
    {
        *("$anchor", "$comment", "$id", "$schema", "default", "deprecated"),
        *("description", "discriminator", "example", "examples", "readOnly"),
        *("title", "writeOnly"),
    }
)
# Of these a value without an effect, which the compiler does not know, is dropped.
_IDLE: Final = {"uniqueItems": False, "unevaluatedProperties": True}
# The compiler's own, by which a schema could have it ignore what it cannot enforce.
OPTIONS: Final = "x-guidance"
# Escapes within texts, where patterns decide about names: a name that may be written as
# "\u0061", too, would not be taken for one that a pattern matches.
_ONE_SPELLING: Final = 'nrbtf\\"'
_DEEPEST: Final = 100  # objects and lists within each other
# The compiler keeps numbers as doubles, and whole ones as 64 bits: where those end it
# never comes back, and takes the process with it.
_LARGEST: Final = 2**62
# The compiler makes a state for each remainder: of a larger number, it makes nothing else
# for minutes, in gigabytes.
_MOST_REMAINDERS: Final = 10_000
_SAYS: Final = _VALUES - {"$ref", "type", "required", "pattern", "format"}


@frozen
class _SchemaPart:
    """A part of a schema, and where it is."""

    part: Any
    path: str
    depth: int = 0


def check_schema(text: str, param: str, *, compiled: bool = False) -> str:
    """A schema as text, all of which can be enforced. Raises GrammarError.

    With `compiled`, it is for the compiler alone: its patterns are in the compiler's
    words, and cannot be checked again.
    """
    try:
        schema = json.loads(text, parse_int=_whole, parse_float=_real)
    except GrammarError as error:
        raise GrammarError(f"{param}: {error}", param) from None
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{param}: is not valid JSON: {error}", param) from None
    try:
        _check_multiples(schema)
    except GrammarError as error:
        raise GrammarError(f"{param}: {error}", param) from None
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        why = "has a lone surrogate, which is half of a character; remove it"
        raise GrammarError(f"{param}: {why}", param) from None
    parts = _all_parts(schema, param)
    if schema is False:
        raise GrammarError(f"{param}: there is no text that false allows", param)
    # The compiler takes objects alone at the top; this one allows as much as `true`.
    whole = {} if schema is True else schema
    given = json.dumps(whole)
    _put_patterns(whole, parts, param)
    return json.dumps(whole) if compiled else given


def _all_parts(schema: Any, param: str) -> list[_SchemaPart]:
    """A schema and all in it, after a check of keywords. Raises GrammarError."""
    due, found = [_SchemaPart(schema, "")], dict[int, _SchemaPart]()
    while due:
        place = due.pop()
        if id(place.part) in found:  # references lead to it
            continue
        found[id(place.part)] = place
        try:
            due += [*_parts(place), *_referred(place, schema)]
        except GrammarError as error:
            raise _at(place, error, param) from None
    return [one for one in found.values() if isinstance(one.part, dict)]


def _at(place: _SchemaPart, error: GrammarError, param: str) -> GrammarError:
    where = f" (at {place.path})" if place.path else ""
    return GrammarError(f"{param}: {error}{where}", param)


def _put_patterns(
    schema: dict[str, Any], parts: Sequence[_SchemaPart], param: str
) -> None:
    """Translate all patterns of a schema for the compiler. Raises GrammarError."""
    decides = any(_decides_by_patterns(one.part) for one in parts)
    for place in parts:
        try:
            if decides:
                _check_named(place.part)
            place.part.update(_compiled_patterns(place.part, decides=decides))
        except GrammarError as error:
            raise _at(place, error, param) from None
    if decides:
        schema[OPTIONS] = {"json_allowed_escapes": _ONE_SPELLING}


def _decides_by_patterns(schema: dict[str, Any]) -> bool:
    """Whether it depends on a name's pattern what its value may be."""
    others = schema.get("additionalProperties") is not False
    return bool(schema.get("patternProperties")) and others


def _check_named(schema: dict[str, Any]) -> None:
    """Raise GrammarError for texts that need escapes by number."""
    values = [schema.get(word) for word in ("const", "enum", "required")]
    properties = schema.get("properties")
    names = [*properties] if isinstance(properties, dict) else []
    for one in _everything([*values, names]):
        texts = one if isinstance(one, dict) else [one]
        for text in texts:
            if isinstance(text, str) and (odd := UNNAMED.intersection(map(ord, text))):
                raise unnamed(min(odd))


def _parts(place: _SchemaPart) -> list[_SchemaPart]:
    """The schemas within one, after a check of its keywords."""
    schema = place.part
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object, true or false")
    if place.depth > _DEEPEST:
        raise GrammarError(f"is nested deeper than {_DEEPEST} levels")
    for word, idle in _IDLE.items():
        if schema.get(word) is idle:
            del schema[word]
    for word, value in schema.items():
        _check_word(word)
        if word in _SAYS:
            _check_exact(value)
    within = [_SchemaPart(one, path, place.depth + 1) for path, one in _within(schema)]
    return [_SchemaPart(one.part, place.path + one.path, one.depth) for one in within]


def _referred(place: _SchemaPart, root: Any) -> list[_SchemaPart]:
    """The schemas that a schema refers to by position, wherever they are."""
    refers = place.part.get("$ref") if isinstance(place.part, dict) else None
    if not isinstance(refers, str) or not refers.startswith("#/"):
        return []
    part = root
    for step in unquote(refers).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return []
    return [_SchemaPart(part, refers[:64], place.depth)] if isinstance(part, dict) else []


def _check_word(word: str) -> None:
    known = _VALUES | _SCHEMA | _SCHEMAS | _NAMED | _COMMENTS
    extension = word.startswith("x-") and word != OPTIONS
    if word not in known and not extension:
        raise GrammarError(
            f"the keyword {word[:64]!r} cannot be enforced; leave it out, or say it "
            "otherwise"
        )


def _whole(digits: str) -> int:
    return _in_range(int(digits), digits)


def _real(digits: str) -> float:
    return _in_range(float(digits), digits)


def _in_range(number: Number, digits: str) -> Number:
    """A number, which must not be too large wherever it is: references lead anywhere."""
    if abs(number) >= _LARGEST:
        shown = digits if len(digits) <= _LONGEST else f"{digits[:_LONGEST]}..."
        raise GrammarError(
            f"the number {shown} is too large; at most 2^62 can be enforced"
        )
    return number


def _check_exact(value: Any) -> None:
    """Raise GrammarError for a whole number that the compiler would round."""
    for one in _everything(value):
        if isinstance(one, int) and float(one) != one:
            raise GrammarError(f"the number {one} has more digits than can be enforced")


def _check_multiples(schema: Any) -> None:
    """Raise GrammarError for numbers whose multiples are too hard to tell, all together:
    what holds of one value may be anywhere in a schema.
    """
    together = 1
    for one in _everything(schema):
        number = one.get("multipleOf") if isinstance(one, dict) else None
        if isinstance(number, int | float) and number:
            together = lcm(together, _hard_part(number))
            if together > _MOST_REMAINDERS:
                why = f"multiples of {number} cannot be told apart"
                raise GrammarError(f"{why}; leave multipleOf out")


def _everything(value: Any) -> Iterator[Any]:
    """A value, and all that is in it."""
    due = [value]
    while due:
        one = due.pop()
        yield one
        if isinstance(one, list):
            due += one
        elif isinstance(one, dict):
            due += one.values()


def _hard_part(number: float) -> int:
    """Its digits as a whole number, without zeros at their end."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))


def _compiled_patterns(schema: dict[str, Any], *, decides: bool) -> dict[str, Any]:
    """The patterns of a schema in the compiler's language. Raises GrammarError."""

    def made(pattern: str) -> str:
        if ends_in_escape(pattern):
            raise GrammarError("a pattern ends with a single backslash")
        return rewrite_pattern(pattern, decides=decides)

    found: dict[str, Any] = {}
    if isinstance(pattern := schema.get("pattern"), str):
        found["pattern"] = made(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        patterns = {made(pattern): one for pattern, one in named.items()}
        if len(patterns) < len(named):
            raise GrammarError("two patterns of patternProperties mean the same")
        found["patternProperties"] = patterns
    return found


def ends_in_escape(pattern: str) -> bool:
    """Whether the last backslash of a regular expression escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _within(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for word, value in schema.items():
        if word in _SCHEMAS and isinstance(value, list):
            yield from ((f"/{word}/{i}", one) for i, one in enumerate(value))
        elif word in _SCHEMA:
            yield f"/{word}", value
        elif word in _NAMED and isinstance(value, dict):
            yield from ((f"/{word}/{name[:64]}", one) for name, one in value.items())
