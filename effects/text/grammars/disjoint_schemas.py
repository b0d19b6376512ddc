"""Whether no value matches two schemas: then `oneOf` is `anyOf`.

Only what shows at once is taken for a difference: other types, other values of `const`
and `enum`, and a required property that differs so.
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
    comparison = _Comparison(root)
    if comparison.discriminated(schemas):
        return True
    return all(
        comparison.differ(entry, other) for entry, other in combinations(schemas, 2)
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
class _Comparison:
    root: Any
    _left: int = field(default=MAX_COMPARISONS)
    _pairs_left: int = field(default=MAX_PAIRS)
    # By the id of a schema, each of which is within the root or the compared ones.
    _known: dict[int, list[_Alternative]] = field(factory=dict)

    def discriminated(self, schemas: Sequence[Any]) -> bool:
        """Whether a required property has other values in each of these objects."""
        said = [self._joined(schema) for schema in schemas]
        if not said or any(_types(entry) != {"object"} for entry in said):
            return False
        return any(
            _all_differ([self._listed(entry, name) for entry in said])
            for name in set.intersection(*map(_required, said))
        )

    def _listed(self, schemas: Schemas, name: str) -> frozenset[str] | None:
        """The only values of a property, if they are listed."""
        said = [
            part for entry in _property(schemas, name) for part in self._joined(entry)
        ]
        return _values(tuple(said))

    def differ(self, entry: Any, other: Any, depth: int = 0) -> bool:
        """Whether no value can match both."""
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            return False
        if entry is False or other is False:
            return True
        first = self._alternatives(entry)
        second = self._alternatives(other)
        return all(
            self._parts_differ(left, right, depth) for left in first for right in second
        )

    def _alternatives(self, schema: Any) -> list[_Alternative]:
        """The alternatives of a schema, which are computed once."""
        if (known := self._known.get(id(schema))) is None:
            made = self._list_alternatives(schema)
            known = self._known[id(schema)] = list(map(_Alternative.of, made))
        return known

    def _list_alternatives(self, schema: Any) -> list[Schemas]:
        """What a schema says, and the schemas that it refers to or joins: once for each
        of its alternatives.
        """
        said = self._joined(schema)
        words = [word for entry in said for word in ("anyOf", "oneOf") if word in entry]
        several = next(
            (entry[words[0]] for entry in said if words and words[0] in entry), None
        )
        if not isinstance(several, list):
            return [said]
        return [(*said, *self._joined(part)) for part in several]

    def _joined(self, schema: Any) -> Schemas:
        result: list[Mapping[str, Any]] = []
        due = [schema]
        while due and len(result) < MAX_DEPTH:
            part = due.pop()
            if not isinstance(part, Mapping):
                continue
            result.append(part)
            due += part["allOf"] if isinstance(part.get("allOf"), list) else []
            if isinstance(reference := part.get("$ref"), str):
                due.append(self._target(reference))
        return tuple(result)

    def _target(self, reference: str) -> Any:
        part = self.root
        for step in reference.split("/")[1:]:
            part = part.get(step) if isinstance(part, Mapping) else None
        return part if reference.startswith("#/") else None

    def _parts_differ(self, entry: _Alternative, other: _Alternative, depth: int) -> bool:
        self._pairs_left -= 1
        if self._pairs_left < 0:
            return False
        types = entry.types & other.types
        if not types:
            return True
        left, right = entry.values, other.values
        if left is not None and right is not None and left.isdisjoint(right):
            return True
        return types == {"object"} and any(
            self.differ(first, second, depth + 1)
            for name in _required(entry.schemas) | _required(other.schemas)
            for first in _property(entry.schemas, name)
            for second in _property(other.schemas, name)
        )


def _all_differ(lists: Sequence[frozenset[str] | None]) -> bool:
    known = [entry for entry in lists if entry is not None]
    return len(known) == len(lists) and sum(map(len, known)) == len(
        frozenset[str]().union(*known)
    )


def _types(schemas: Schemas) -> frozenset[str]:
    """The types that all of these allow."""
    result = _TYPES
    for schema in schemas:
        kinds = schema.get("type")
        if isinstance(kinds, str | list):
            several = [kinds] if isinstance(kinds, str) else [*map(str, kinds)]
            null = ["null"] if schema.get("nullable") is True else []
            result &= {
                "number" if entry == "integer" else entry for entry in several + null
            }
        elif (values := _values((schema,))) is not None:
            result &= {_type(json.loads(entry)) for entry in values}
    return result


def _type(value: Any) -> str:
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), "number")


def _values(schemas: Schemas) -> frozenset[str] | None:
    """The only values that these allow, in JSON; None if they are not listed."""
    result: frozenset[str] | None = None
    for schema in schemas:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            listed = frozenset(map(_written, values))
            result = listed if result is None else result & listed
    return result


def _written(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _required(schemas: Schemas) -> set[str]:
    lists = [schema.get("required") for schema in schemas]
    names = [entry for names in lists if isinstance(names, list) for entry in names]
    return {entry for entry in names if isinstance(entry, str)}


def _property(schemas: Schemas, name: str) -> Iterator[Any]:
    """What these say of a property."""
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif "patternProperties" not in schema and "additionalProperties" in schema:
            yield schema["additionalProperties"]
