"""Rewrites JSON schemas to the keywords that the compiler enforces.

A rewriting changes one schema in place, but not its subschemas. It keeps the meaning, or
allows less where parsers accept less of a format or a bound. Rewriting is idempotent.
Comments are dropped: they have no effect, and schemas without them are equal more often.

    nullable                  null among the types, as OpenAPI 3.0 says
    not: {}                   allOf: [false]
    format                    a pattern, the compiler's own, or nothing
    pattern with look-aheads  patterns without
    propertyNames             properties, or patternProperties
    oneOf                     anyOf, if its parts exclude each other
    uniqueItems               dropped, where there is one item at most
    bounds beyond 2^62        bounds below
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

from attrs import define

from minfer.effects.text.grammars.disjoint_schemas import all_disjoint
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.keyword_values import (
    COMMENTS,
    pointer_keys,
    read_format,
    require,
    require_all,
    translate_keyword,
)
from minfer.effects.text.grammars.lookaheads import as_one_pattern, without_lookaheads
from minfer.effects.text.grammars.property_names import PropertyNames

# By keyword: the value that has no effect, and is dropped.
_NO_EFFECT: Final = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "nullable": False,
    "not": False,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "propertyNames": True,
}
# The largest number below 2^62 that is kept exactly.
LARGEST_BOUND: Final = 2**62 - 2**9
_LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS: Final = ("maximum", "exclusiveMaximum")


def referred_names(schema: Any) -> frozenset[str]:
    """All keys in the paths of a schema's references."""
    names, pending = set[str](), [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            if isinstance(reference := value.get("$ref"), str):
                names.update(pointer_keys(reference))
    return frozenset(names)


@define
class Rewriting:
    """Rewrites the parts of one schema."""

    root: Any
    _referred: frozenset[str]

    @staticmethod
    def of(root: Any) -> "Rewriting":
        """The rewriting of a whole schema."""
        return Rewriting(root, referred_names(root))

    def rewrite(self, schema: dict[str, Any]) -> None:
        """Rewrite one schema in place. Raises GrammarError for an invalid value of a
        keyword.
        """
        for word in [*schema]:
            comment = word in COMMENTS or (word.startswith("x-") and word != "x-guidance")
            if comment and word not in self._referred:
                del schema[word]
        _allow_null(schema)
        _forbid(schema)
        _bound_items(schema)
        _keep_bounds_small(schema)
        read_format(schema)
        _split_pattern(schema)
        self._name_properties(schema)
        self._exclude(schema)
        for word, idle in _NO_EFFECT.items():
            if word in schema and _same(schema[word], idle):
                del schema[word]

    def _exclude(self, schema: dict[str, Any]) -> None:
        alternatives = schema.get("oneOf")
        if not isinstance(alternatives, list) or "oneOf" in self._referred:
            return
        if all_disjoint(alternatives, self.root):
            del schema["oneOf"]
            require(schema, "anyOf", alternatives)

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """Replace `propertyNames` by `properties`, or by one pattern of
        `patternProperties`.
        """
        schema_of_names = schema.get("propertyNames", ...)
        if not isinstance(schema_of_names, dict | bool) or "patternProperties" in schema:
            return
        if "additionalProperties" in self._referred:
            return
        names = PropertyNames.of(schema_of_names, self.root)
        if names is None:
            return
        del schema["propertyNames"]
        if names.all:
            return
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            return
        other_values = schema.get("additionalProperties", True)
        allowed = {
            name: subschema if names.has(name) else False
            for name, subschema in properties.items()
        }
        if names.listed is not None:
            new_names = [name for name in names.listed if name not in allowed]
            allowed |= dict.fromkeys(new_names, self._shared(other_values))
        elif other_values is not False:
            schema["patternProperties"] = {names.pattern: other_values}
        schema["properties"] = allowed
        schema["additionalProperties"] = False

    def _shared(self, schema: Any) -> Any:
        """A schema to be used in several places: a reference, unless it is small."""
        if not isinstance(schema, dict) or schema.keys() <= {"type", "$ref"}:
            return schema
        definitions = self.root.setdefault("$defs", {})
        if not isinstance(definitions, dict):
            raise GrammarError("$defs must be an object of schemas")
        name = next(name for i in count() if (name := f"names_{i}") not in definitions)
        definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _allow_null(schema: dict[str, Any]) -> None:
    """OpenAPI 3.0: null is allowed beside the type, if there is one."""
    nullable = schema.pop("nullable", False)
    if not isinstance(nullable, bool):
        raise GrammarError("nullable must be true or false")
    stated_types = schema.get("type")
    if nullable and isinstance(stated_types, str | list):
        types = stated_types if isinstance(stated_types, list) else [stated_types]
        schema["type"] = types if "null" in types else [*types, "null"]


def _forbid(schema: dict[str, Any]) -> None:
    forbidden = schema.get("not")
    if forbidden is True or forbidden == {}:
        del schema["not"]
        require_all(schema, False)


def _bound_items(schema: dict[str, Any]) -> None:
    if schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1):
        del schema["uniqueItems"]


def _keep_bounds_small(schema: dict[str, Any]) -> None:
    """Replace bounds that are larger than the compiler's numbers."""
    for words, sign in ((_LOWER_BOUNDS, -1), (_UPPER_BOUNDS, 1)):
        for word in words:
            bound = schema.get(word)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            if bound * sign > LARGEST_BOUND:
                schema[word] = sign * LARGEST_BOUND


def _split_pattern(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        first, *other_patterns = translate_keyword(without_lookaheads, "pattern", pattern)
        schema["pattern"] = first
        for other_pattern in other_patterns:
            require(schema, "pattern", other_pattern)
    named = schema.get("patternProperties")
    if isinstance(named, dict):
        schema["patternProperties"] = {
            translate_keyword(as_one_pattern, "patternProperties", pattern): subschema
            for pattern, subschema in named.items()
        }


def _same(value: Any, default: Any) -> bool:
    """Whether two values are equal and of one type: true is not 1."""
    return type(value) is type(default) and value == default


def nested_values(schemas: Sequence[Any]) -> Iterator[Any]:
    """Values, and all nested values."""
    pending = [*schemas]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
