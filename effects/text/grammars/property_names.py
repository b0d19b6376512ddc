"""The names that properties may have, by the schema in `propertyNames`."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import KeywordError
from minfer.effects.text.grammars.keyword_values import (
    COMMENTS,
    read_format,
    steps_of,
    translated,
)
from minfer.effects.text.grammars.lookaheads import as_one_pattern, matches

MAX_DEPTH: Final = 4  # references, and alternatives within each other
_ANY_NAME: Final[tuple[dict[str, str], ...]] = ({}, {"type": "string"})
_OF_NAMES: Final = frozenset({"enum", "const", "pattern", "format"})
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
        return not self.pattern or translated(
            matches, "propertyNames", self.pattern, name
        )

    @staticmethod
    def of(schema: Any, root: Any) -> "PropertyNames | None":
        """The names that a schema allows, if there is one pattern of them."""
        return _Reading(root).names(schema)


@define
class _Reading:
    """Reads which names schemas within one root allow, of each schema once."""

    root: Any
    # By the id of a schema; None, too, while that is read: then it refers to itself.
    _known: dict[int, PropertyNames | None] = field(factory=dict)

    def names(self, schema: Any, depth: int = 0) -> PropertyNames | None:
        """The names that a schema allows, if there is one pattern of them."""
        if isinstance(schema, bool):
            return PropertyNames() if schema else PropertyNames([])
        result = _resolved(schema, self.root)
        if result is None or depth > MAX_DEPTH:
            return None
        if id(result) not in self._known:
            self._known[id(result)] = None
            self._known[id(result)] = self._read(result, depth)
        return self._known[id(result)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> PropertyNames | None:
        said = {word: entry for word, entry in schema.items() if word not in COMMENTS}
        several = said.pop("anyOf", None) or said.pop("oneOf", None)
        if isinstance(several, list):
            if said not in _ANY_NAME:
                return None
            return _any_of([self.names(entry, depth + 1) for entry in several])
        _check_types(said)
        kinds = said.pop("type", "string")
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            return PropertyNames([])
        return _said_of_names(said)


def _check_types(said: Mapping[str, Any]) -> None:
    """Raise KeywordError for a keyword with a value of another type."""
    for word, (kinds, what) in _TYPES.items():
        if word in said and not isinstance(said[word], kinds):
            message = f"{word} in propertyNames must be {what}"
            raise KeywordError(message, "propertyNames")


def _any_of(names: list[PropertyNames | None]) -> PropertyNames | None:
    """The names that any of these allow."""
    if any(entry is not None and entry.all for entry in names):
        return PropertyNames()
    lists = [
        entry.listed for entry in names if entry is not None and entry.listed is not None
    ]
    if len(lists) < len(names):
        return None
    return PropertyNames([*dict.fromkeys(name for entry in lists for name in entry)])


def _said_of_names(said: dict[str, Any]) -> PropertyNames | None:
    """The names that a schema's own keywords allow."""
    if said.keys() - _OF_NAMES.union(_LENGTHS):
        return None
    read_format(said)
    if "format" in said:  # one of the compiler's
        return None
    patterns = [said["pattern"]] if isinstance(said.get("pattern"), str) else []
    patterns += [entry["pattern"] for entry in said.get("allOf", [])]
    lengths = [said.get(word) for word in _LENGTHS]
    if not all(entry is None or (type(entry) is int and entry >= 0) for entry in lengths):
        return None
    least, most = ("" if entry is None else entry for entry in lengths)
    if least or most != "":
        patterns.append(f"^(?s:.{{{least or 0},{most}}})$")
    pattern = translated(as_one_pattern, "propertyNames", *patterns) if patterns else ""
    names = PropertyNames(None, pattern)
    values = said.get("enum", [said["const"]] if "const" in said else None)
    if not isinstance(values, list):
        return names
    texts = dict.fromkeys(entry for entry in values if isinstance(entry, str))
    return PropertyNames([entry for entry in texts if names.has(entry)])


def _resolved(schema: Any, root: Any) -> Mapping[str, Any] | None:
    """A schema, or the one that it refers to."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or len(schema) > 1 or reference[:2] != "#/":
            break
        schema = root
        for step in steps_of(reference):
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else None
