"""Schemas that no value can match, as a value would have to contain itself.

Schema A needs schema B if each value of A is or contains a value of B: by `$ref`, by
`allOf`, or as a required property. A schema that needs itself has no values. The compiler
detects this for a whole schema, but not for a part of a larger grammar: there, an answer
that reaches the part could not continue.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def find_endless(
    schemas: Sequence[dict[str, Any]], target: Callable[[str], Any]
) -> dict[str, Any] | None:
    """Returns one of the schemas that needs itself, or None; `target` resolves a
    reference.
    """
    open_ones, done = set[int](), set[int]()
    for schema in schemas:
        due = [(schema, _needed(schema, target))]
        open_ones.add(id(schema))
        while due and id(schema) not in done:
            current, needed = due[-1]
            following = next((entry for entry in needed if id(entry) not in done), None)
            if following is None:
                done.add(id(current))
                open_ones.discard(id(current))
                due.pop()
            elif id(following) in open_ones:
                return following
            else:
                open_ones.add(id(following))
                due.append((following, _needed(following, target)))
        open_ones.discard(id(schema))
    return None


def _needed(
    schema: dict[str, Any], target: Callable[[str], Any]
) -> Iterator[dict[str, Any]]:
    """The schemas that a schema needs."""
    result: list[Any] = []
    if isinstance(reference := schema.get("$ref"), str):
        result.append(target(reference))
    if isinstance(parts := schema.get("allOf"), list):
        result += parts
    if isinstance(parts := schema.get("anyOf"), list) and len(parts) == 1:
        result += parts
    properties, required = schema.get("properties"), schema.get("required")
    whole = schema.get("type") == "object" and isinstance(properties, dict)
    if whole and isinstance(properties, dict) and isinstance(required, list):
        result += [properties.get(name) for name in required if isinstance(name, str)]
    return (entry for entry in result if isinstance(entry, dict))
