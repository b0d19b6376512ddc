"""Whether no value matches two schemas: then `oneOf` is `anyOf`.

Only simple differences count: other types, other values of `const` and `enum`, and a
required property that differs so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from attrs import define, field, frozen

MAX_DEPTH: Final = 8  # schemas within each other that are looked into
MAX_COMPARISONS: Final = 4096
MAX_PAIRS: Final = 32_768  # of alternatives that are compared
_TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
Schemas = tuple[Mapping[str, Any], ...]  # of which all hold


def all_disjoint(schemas: Sequence[Any], root: Any) -> bool:
    """Whether each two of these schemas exclude each other; references lead to `root`."""
    comparison = _SchemaComparison(root)
    if comparison.have_discriminator(schemas):
        return True
    return all(
        comparison.differ(schema, other_schema)
        for schema, other_schema in combinations(schemas, 2)
    )


@frozen
class _Alternative:
    """One alternative of a schema: the schemas that hold together, the types that these
    allow, and the only values, if they are listed.
    """

    schemas: Schemas
    types: frozenset[str]
    values: frozenset[str] | None

    @classmethod
    def of(cls, schemas: Schemas) -> "_Alternative":
        return cls(schemas, _types(schemas), _values(schemas))


@define
class _SchemaComparison:
    root: Any
    _comparisons_left: int = field(default=MAX_COMPARISONS)
    _pairs_left: int = field(default=MAX_PAIRS)
    # By the id of a schema, each of which is within the root or the compared ones.
    _alternatives_by_id: dict[int, list[_Alternative]] = field(factory=dict)

    def have_discriminator(self, schemas: Sequence[Any]) -> bool:
        """Whether a required property has other values in each of these objects."""
        joined_schemas = [self._joined(schema) for schema in schemas]
        if not joined_schemas or any(
            _types(joined) != {"object"} for joined in joined_schemas
        ):
            return False
        return any(
            _all_differ([self._listed(joined, name) for joined in joined_schemas])
            for name in set.intersection(*map(_required, joined_schemas))
        )

    def _listed(self, schemas: Schemas, name: str) -> frozenset[str] | None:
        """The only values of a property, if they are listed."""
        joined = [
            member
            for schema in _property(schemas, name)
            for member in self._joined(schema)
        ]
        return _values(tuple(joined))

    def differ(self, schema: Any, other_schema: Any, depth: int = 0) -> bool:
        """Whether no value can match both."""
        self._comparisons_left -= 1
        if depth > MAX_DEPTH or self._comparisons_left < 0:
            return False
        if schema is False or other_schema is False:
            return True
        alternatives = self._alternatives(schema)
        other_alternatives = self._alternatives(other_schema)
        return all(
            self._alternatives_differ(left, right, depth)
            for left in alternatives
            for right in other_alternatives
        )

    def _alternatives(self, schema: Any) -> list[_Alternative]:
        """The alternatives of a schema, which are computed once."""
        if (alternatives := self._alternatives_by_id.get(id(schema))) is None:
            schema_lists = self._list_alternatives(schema)
            alternatives = self._alternatives_by_id[id(schema)] = list(
                map(_Alternative.of, schema_lists)
            )
        return alternatives

    def _list_alternatives(self, schema: Any) -> list[Schemas]:
        """What a schema says, and the schemas that it refers to or joins: once for each
        of its alternatives.
        """
        joined = self._joined(schema)
        words = [
            word for member in joined for word in ("anyOf", "oneOf") if word in member
        ]
        alternatives = next(
            (member[words[0]] for member in joined if words and words[0] in member), None
        )
        if not isinstance(alternatives, list):
            return [joined]
        return [(*joined, *self._joined(alternative)) for alternative in alternatives]

    def _joined(self, schema: Any) -> Schemas:
        result: list[Mapping[str, Any]] = []
        pending = [schema]
        while pending and len(result) < MAX_DEPTH:
            current = pending.pop()
            if not isinstance(current, Mapping):
                continue
            result.append(current)
            pending += current["allOf"] if isinstance(current.get("allOf"), list) else []
            if isinstance(reference := current.get("$ref"), str):
                pending.append(self._target(reference))
        return tuple(result)

    def _target(self, reference: str) -> Any:
        target = self.root
        for key in reference.split("/")[1:]:
            target = target.get(key) if isinstance(target, Mapping) else None
        return target if reference.startswith("#/") else None

    def _alternatives_differ(
        self, alternative: _Alternative, other_alternative: _Alternative, depth: int
    ) -> bool:
        self._pairs_left -= 1
        if self._pairs_left < 0:
            return False
        types = alternative.types & other_alternative.types
        if not types:
            return True
        left, right = alternative.values, other_alternative.values
        if left is not None and right is not None and left.isdisjoint(right):
            return True
        return types == {"object"} and any(
            self.differ(first, second, depth + 1)
            for name in _required(alternative.schemas)
            | _required(other_alternative.schemas)
            for first in _property(alternative.schemas, name)
            for second in _property(other_alternative.schemas, name)
        )


def _all_differ(lists: Sequence[frozenset[str] | None]) -> bool:
    listed = [values for values in lists if values is not None]
    return len(listed) == len(lists) and sum(map(len, listed)) == len(
        frozenset[str]().union(*listed)
    )


def _types(schemas: Schemas) -> frozenset[str]:
    """The types that all of these allow."""
    result = _TYPES
    for schema in schemas:
        kinds = schema.get("type")
        if isinstance(kinds, str | list):
            names = [kinds] if isinstance(kinds, str) else [*map(str, kinds)]
            nulls = ["null"] if schema.get("nullable") is True else []
            result &= {"number" if kind == "integer" else kind for kind in names + nulls}
        elif (values := _values((schema,))) is not None:
            result &= {_type_name(json.loads(value)) for value in values}
    return result


def _type_name(value: Any) -> str:
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), "number")


def _values(schemas: Schemas) -> frozenset[str] | None:
    """The only values that these allow, in JSON; None if they are not listed."""
    result: frozenset[str] | None = None
    for schema in schemas:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            listed = frozenset(map(_canonical_json, values))
            result = listed if result is None else result & listed
    return result


def _canonical_json(value: Any) -> str:
    is_integral = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_integral else value, sort_keys=True)


def _required(schemas: Schemas) -> set[str]:
    lists = [schema.get("required") for schema in schemas]
    names = [name for names in lists if isinstance(names, list) for name in names]
    return {name for name in names if isinstance(name, str)}


def _property(schemas: Schemas, name: str) -> Iterator[Any]:
    """What these say of a property."""
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif "patternProperties" not in schema and "additionalProperties" in schema:
            yield schema["additionalProperties"]
