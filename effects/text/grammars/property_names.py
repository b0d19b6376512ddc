"""The names that properties may have, by the schema in `propertyNames`."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import KeywordError
from minfer.effects.text.grammars.keyword_values import (
    COMMENTS,
    pointer_keys,
    read_format,
    translate_keyword,
)
from minfer.effects.text.grammars.lookaheads import as_one_pattern, matches

MAX_DEPTH: Final = 4  # references, and alternatives within each other
_ANY_NAME: Final[tuple[dict[str, str], ...]] = ({}, {"type": "string"})
_NAME_KEYWORDS: Final = frozenset({"enum", "const", "pattern", "format"})
_TYPES: Final[Mapping[str, tuple[type | tuple[type, ...], str]]] = {
    "type": ((str, list), "a text or a list of texts"),
    "enum": (list, "a list"),
    "pattern": (str, "a text"),
    "format": (str, "a text"),
    "minLength": (int, "a number"),
    "maxLength": (int, "a number"),
}
_LENGTHS: Final = ("minLength", "maxLength")


@define
class PropertyNames:
    """The names that properties may have: all, some, or those that match a pattern."""

    listed: list[str] | None = None
    pattern: str = ""

    @property
    def all(self) -> bool:
        """Whether any name is allowed."""
        return self.listed is None and not self.pattern

    def has(self, name: str) -> bool:
        """Whether a name is allowed. Raises KeywordError if that cannot be known."""
        if self.listed is not None:
            return name in self.listed
        return not self.pattern or translate_keyword(
            matches, "propertyNames", self.pattern, name
        )

    @staticmethod
    def of(schema: Any, root: Any) -> "PropertyNames | None":
        """The names that a schema allows, if there is one pattern of them."""
        return _NameReader(root).names(schema)


@define
class _NameReader:
    """Reads which names schemas within one root allow, of each schema once."""

    root: Any
    # By the id of a schema; None, too, while that is read: then it refers to itself.
    _known: dict[int, PropertyNames | None] = field(factory=dict)

    def names(self, schema: Any, depth: int = 0) -> PropertyNames | None:
        """The names that a schema allows, if there is one pattern of them."""
        if isinstance(schema, bool):
            return PropertyNames() if schema else PropertyNames([])
        result = _resolve(schema, self.root)
        if result is None or depth > MAX_DEPTH:
            return None
        if id(result) not in self._known:
            self._known[id(result)] = None
            self._known[id(result)] = self._read(result, depth)
        return self._known[id(result)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> PropertyNames | None:
        keywords = {word: value for word, value in schema.items() if word not in COMMENTS}
        alternatives = keywords.pop("anyOf", None) or keywords.pop("oneOf", None)
        if isinstance(alternatives, list):
            if keywords not in _ANY_NAME:
                return None
            return _any_of(
                [self.names(alternative, depth + 1) for alternative in alternatives]
            )
        _check_types(keywords)
        types = keywords.pop("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return PropertyNames([])
        return _names_by_keywords(keywords)


def _check_types(keywords: Mapping[str, Any]) -> None:
    """Raise KeywordError for a keyword with a value of another type."""
    for word, (types, expected) in _TYPES.items():
        if word in keywords and not isinstance(keywords[word], types):
            message = f"{word} in propertyNames must be {expected}"
            raise KeywordError(message, "propertyNames")


def _any_of(names: list[PropertyNames | None]) -> PropertyNames | None:
    """The names that any of these allow."""
    if any(allowed is not None and allowed.all for allowed in names):
        return PropertyNames()
    lists = [
        allowed.listed
        for allowed in names
        if allowed is not None and allowed.listed is not None
    ]
    if len(lists) < len(names):
        return None
    return PropertyNames([*dict.fromkeys(name for listed in lists for name in listed)])


def _names_by_keywords(keywords: dict[str, Any]) -> PropertyNames | None:
    """The names that a schema's own keywords allow."""
    if keywords.keys() - _NAME_KEYWORDS.union(_LENGTHS):
        return None
    read_format(keywords)
    if "format" in keywords:  # one of the compiler's
        return None
    patterns = [keywords["pattern"]] if isinstance(keywords.get("pattern"), str) else []
    patterns += [subschema["pattern"] for subschema in keywords.get("allOf", [])]
    lengths = [keywords.get(word) for word in _LENGTHS]
    if not all(
        length is None or (type(length) is int and length >= 0) for length in lengths
    ):
        return None
    minimum, maximum = ("" if length is None else length for length in lengths)
    if minimum or maximum != "":
        patterns.append(f"^(?s:.{{{minimum or 0},{maximum}}})$")
    pattern = (
        translate_keyword(as_one_pattern, "propertyNames", *patterns) if patterns else ""
    )
    names = PropertyNames(None, pattern)
    values = keywords.get("enum", [keywords["const"]] if "const" in keywords else None)
    if not isinstance(values, list):
        return names
    texts = dict.fromkeys(value for value in values if isinstance(value, str))
    return PropertyNames([text for text in texts if names.has(text)])


def _resolve(schema: Any, root: Any) -> Mapping[str, Any] | None:
    """A schema, or the one that it refers to."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or len(schema) > 1 or reference[:2] != "#/":
            break
        schema = root
        for step in pointer_keys(reference):
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else None
