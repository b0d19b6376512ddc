"""JSON schemas: which keywords are enforced, and which are refused.

By the standard, an unknown keyword means nothing. Here it is refused: its author expects
an effect. So are known keywords that no mask could enforce; keywords that only comment
are accepted, without an effect. A `lenient` check, of a schema that need not be enforced,
drops the keywords that it would refuse, and so allows more values.

The check reads only keywords, after they were rewritten (`rewriting.py`). The compiler
decides which values a keyword may have, and whether a value can satisfy the schema.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from attrs import define, field, frozen

from minfer.effects.text.grammars.character_sets import ONLY_NUMBERED, unnamed_error
from minfer.effects.text.grammars.endless_schemas import find_endless
from minfer.effects.text.grammars.grammar_library import GrammarError, KeywordError
from minfer.effects.text.grammars.joint_patterns import JointPatterns
from minfer.effects.text.grammars.keyword_values import COMMENTS, pointer_keys, require
from minfer.effects.text.grammars.patterns import rewrite_pattern
from minfer.effects.text.grammars.rewriting import Rewriting, nested_values
from minfer.effects.text.grammars.schema_numbers import (
    Multiples,
    check_counts,
    check_numbers,
)

_VALUE_KEYWORDS: Final = frozenset(
    {
        *("$ref", "type", "enum", "const", "required", "pattern", "format"),
        *("minLength", "maxLength", "minimum", "maximum", "multipleOf"),
        *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
        *("minProperties", "maxProperties"),
    }
)
_SCHEMA_KEYWORDS: Final = frozenset({"additionalProperties", "additionalItems", "items"})
_SCHEMA_LIST_KEYWORDS: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
)
_SCHEMA_MAP_KEYWORDS: Final = frozenset(
    {"$defs", "definitions", "properties", "patternProperties"}
)
_IDENTIFIERS: Final = frozenset({"$anchor", "$id", "$schema"})
_KNOWN_KEYWORDS: Final = (
    _VALUE_KEYWORDS
    | _SCHEMA_KEYWORDS
    | _SCHEMA_LIST_KEYWORDS
    | _SCHEMA_MAP_KEYWORDS
    | COMMENTS
    | _IDENTIFIERS
)
# The compiler's own, by which a schema could have it ignore what it cannot enforce.
OPTIONS: Final = "x-guidance"
# Escapes within texts, where patterns decide about names: a name that may be written as
# "\u0061", too, would not be taken for one that a pattern matches.
_ALLOWED_ESCAPES: Final = 'nrbtf\\"'
_MAX_DEPTH: Final = 100  # objects and lists within each other
_MAX_POSITION_DIGITS: Final = 9  # of a position in a list
_CHECKED_KEYWORDS: Final = _VALUE_KEYWORDS - {
    "$ref",
    "type",
    "required",
    "pattern",
    "format",
}
# What to do about a keyword that cannot be enforced, where it is not obvious.
_REMEDIES: Final = {
    "uniqueItems": "leave it out, or set maxItems to 1",
    "propertyNames": "use one pattern or an enum, or list the names in properties",
    "contains": "say in items what all items are",
    "if": "say anyOf instead",
    "not": "say what is allowed instead, as an enum or by anyOf",
    "unevaluatedProperties": "say additionalProperties instead",
    "unevaluatedItems": "say items instead",
    "dependentRequired": "say required instead, or anyOf",
    "dependentSchemas": "say anyOf instead",
    "$dynamicRef": "say $ref instead",
}


@frozen
class _SchemaPlace:
    """A part of a schema, and where it is."""

    schema: Any
    path: str
    depth: int = 0


def check_schema(
    text: str, param: str, *, compiled: bool = False, lenient: bool = False
) -> str:
    """Returns a schema as text, all of which can be enforced. Raises GrammarError; with
    `lenient`, only for a text that is no schema.

    With `compiled`, it is for the compiler alone: its patterns are in the compiler's
    words, and cannot be checked again.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{param}: is not valid JSON: {error}", param) from None
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        reason = "has a lone surrogate, which is half of a character; remove it"
        raise GrammarError(f"{param}: {reason}", param) from None
    if schema is False:
        raise GrammarError(f"{param}: there is no text that false allows", param)
    # The compiler takes objects alone at the top; this one allows as much as `true`.
    root = {} if schema is True else schema
    check = _SchemaCheck(root, param, lenient, Rewriting.of(root))
    places = check.all_parts()
    result = json.dumps(root)
    if compiled:
        check.translate_patterns(places)
        result = json.dumps(root)
    return result


@define
class _SchemaCheck:
    """The check of one schema, which is changed in place."""

    root: Any
    param: str
    lenient: bool
    rewriting: Rewriting
    multiples: Multiples = field(factory=Multiples)

    def all_parts(self) -> list[_SchemaPlace]:
        """A schema and all in it, after a check of keywords. Raises GrammarError."""
        pending, visited = [_SchemaPlace(self.root, "")], dict[int, _SchemaPlace]()
        while pending:
            place = pending.pop()
            if id(place.schema) in visited:  # references lead to it
                continue
            visited[id(place.schema)] = place
            pending += self._try(place, self._check_part)
        places = [place for place in visited.values() if isinstance(place.schema, dict)]
        self._check_endless(places)
        joint = JointPatterns(self._part_at)
        for place in places:
            self._try(place, lambda place: joint.check(place.schema))
        decides = _any_decides(places)
        for place in places:
            self._try(place, partial(_compile_patterns, decides=decides))
            if decides:
                self._try(place, _check_spellable)
        return places

    def translate_patterns(self, places: list[_SchemaPlace]) -> None:
        """Translate all patterns of a checked schema for the compiler."""
        decides = _any_decides(places)
        for place in places:
            place.schema.update(_compile_patterns(place, decides=decides))
        if decides:
            self.root[OPTIONS] = {"json_allowed_escapes": _ALLOWED_ESCAPES}

    def _try(self, place: _SchemaPlace, step: Callable[[_SchemaPlace], Any]) -> Any:
        """Call a step. A lenient check drops the keywords that the step refuses; else
        GrammarError is raised.
        """
        while True:
            try:
                return step(place)
            except GrammarError as error:
                if self.lenient and isinstance(error, KeywordError):
                    _drop_keyword(place.schema, error.word)
                    continue
                location = f" (at {place.path})" if place.path else ""
                raise GrammarError(
                    f"{self.param}: {error}{location}", self.param
                ) from None

    def _check_part(self, place: _SchemaPlace) -> list[_SchemaPlace]:
        """The schemas within one, after a check of its keywords."""
        schema = place.schema
        if isinstance(schema, bool):
            return []
        if not isinstance(schema, dict):
            raise GrammarError("a schema must be an object, true or false")
        if place.depth > _MAX_DEPTH:
            raise GrammarError(f"is nested deeper than {_MAX_DEPTH} levels")
        self.rewriting.rewrite(schema)
        for word, value in schema.items():
            _check_word(word)
            if word in _CHECKED_KEYWORDS:
                check_numbers(word, value)
        check_counts(schema)
        self.multiples.add(schema.get("multipleOf"))
        subschemas = [
            (f"{place.path}{path}", subschema) for path, subschema in _subschemas(schema)
        ]
        places = [
            _SchemaPlace(subschema, path, place.depth + 1)
            for path, subschema in subschemas
        ]
        return [*places, *self._referred_place(place)]

    def _referred_place(self, place: _SchemaPlace) -> list[_SchemaPlace]:
        """The schema that a schema refers to by position, wherever it is."""
        reference = place.schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return []
        target = self._part_at(reference)
        if target is ...:
            raise GrammarError(
                f"$ref {reference[:64]!r} does not exist; define it, or drop it"
            )
        return [_SchemaPlace(target, reference[:64], place.depth)]

    def _part_at(self, reference: str) -> Any:
        """What a reference by position leads to; an ellipsis for nothing."""
        if reference != "#" and not reference.startswith("#/"):
            return ...
        target = self.root
        for name in pointer_keys(reference):
            if isinstance(target, dict):
                target = target.get(name, ...)
            elif isinstance(target, list) and _is_position(name, target):
                target = target[int(name)]
            else:
                target = ...
        return target

    def _check_endless(self, places: list[_SchemaPlace]) -> None:
        """Raise GrammarError for a schema whose values would contain themselves."""
        endless = find_endless([place.schema for place in places], self._part_at)
        if endless is not None:
            place = next(candidate for candidate in places if candidate.schema is endless)
            message = "has no value, as each would have to be within itself; let it end"
            location = f" (at {place.path})" if place.path else ""
            raise GrammarError(f"{self.param}: {message}{location}", self.param)


def _is_position(name: str, items: list[Any]) -> bool:
    short = name.isdecimal() and len(name) <= _MAX_POSITION_DIGITS
    return short and int(name) < len(items)


def _drop_keyword(schema: dict[str, Any], word: str) -> None:
    """Drop a keyword, so that more is allowed."""
    value = schema.pop(word)
    if word == "oneOf":
        require(schema, "anyOf", value)
    if word == "patternProperties":
        schema["additionalProperties"] = True


def _any_decides(places: list[_SchemaPlace]) -> bool:
    return any(_decides_by_patterns(place.schema) for place in places)


def _decides_by_patterns(schema: dict[str, Any]) -> bool:
    """Whether it depends on a name's pattern what its value may be."""
    has_others = schema.get("additionalProperties") is not False
    return bool(schema.get("patternProperties")) and has_others


def _check_spellable(place: _SchemaPlace) -> None:
    """Raise GrammarError for texts that need escapes by number."""
    schema = place.schema
    values = [schema.get(word) for word in ("const", "enum", "required")]
    properties = schema.get("properties")
    names = [*properties] if isinstance(properties, dict) else []
    for value in nested_values([*values, names]):
        texts = value if isinstance(value, dict) else [value]
        for text in texts:
            if isinstance(text, str) and (
                unnamed_codes := ONLY_NUMBERED.intersection(map(ord, text))
            ):
                raise unnamed_error(min(unnamed_codes))


def _check_word(word: str) -> None:
    extension = word.startswith("x-") and word != OPTIONS
    if word == "oneOf":
        message = (
            "the keyword 'oneOf' cannot be enforced, as its parts do not exclude each"
        )
        raise KeywordError(f"{message} other; say anyOf instead", word)
    if word not in _KNOWN_KEYWORDS and not extension:
        remedy = _REMEDIES.get(word, "leave it out, or say it otherwise")
        raise KeywordError(
            f"the keyword {word[:64]!r} cannot be enforced; {remedy}", word
        )


def _compile_patterns(place: _SchemaPlace, *, decides: bool) -> dict[str, Any]:
    """The patterns of a schema in the compiler's language. Raises GrammarError."""
    schema = place.schema

    def rewrite(pattern: str, word: str) -> str:
        if ends_in_escape(pattern):
            raise KeywordError("a pattern ends with a single backslash", word)
        try:
            return rewrite_pattern(pattern, decides=decides)
        except GrammarError as error:
            raise KeywordError(str(error), word) from None

    patterns_by_word: dict[str, Any] = {}
    if isinstance(pattern := schema.get("pattern"), str):
        patterns_by_word["pattern"] = rewrite(pattern, "pattern")
    word = "patternProperties"
    if isinstance(named := schema.get(word), dict):
        patterns = {
            rewrite(pattern, word): subschema for pattern, subschema in named.items()
        }
        if len(patterns) < len(named):
            raise KeywordError(f"two patterns of {word} mean the same", word)
        patterns_by_word[word] = patterns
    return patterns_by_word


def ends_in_escape(pattern: str) -> bool:
    """Whether the last backslash of a regular expression escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for word, value in schema.items():
        if word in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            yield from ((f"/{word}/{i}", subschema) for i, subschema in enumerate(value))
        elif word in _SCHEMA_KEYWORDS:
            yield f"/{word}", value
        elif word in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            yield from (
                (f"/{word}/{name[:64]}", subschema) for name, subschema in value.items()
            )
