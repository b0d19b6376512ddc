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
    open_ids, done_ids = set[int](), set[int]()
    for schema in schemas:
        stack = [(schema, _needed_schemas(schema, target))]
        open_ids.add(id(schema))
        while stack and id(schema) not in done_ids:
            current, needed = stack[-1]
            following = next(
                (candidate for candidate in needed if id(candidate) not in done_ids), None
            )
            if following is None:
                done_ids.add(id(current))
                open_ids.discard(id(current))
                stack.pop()
            elif id(following) in open_ids:
                return following
            else:
                open_ids.add(id(following))
                stack.append((following, _needed_schemas(following, target)))
        open_ids.discard(id(schema))
    return None


def _needed_schemas(
    schema: dict[str, Any], target: Callable[[str], Any]
) -> Iterator[dict[str, Any]]:
    """The schemas that a schema needs."""
    candidates: list[Any] = []
    if isinstance(reference := schema.get("$ref"), str):
        candidates.append(target(reference))
    if isinstance(subschemas := schema.get("allOf"), list):
        candidates += subschemas
    if isinstance(subschemas := schema.get("anyOf"), list) and len(subschemas) == 1:
        candidates += subschemas
    properties, required = schema.get("properties"), schema.get("required")
    is_object = schema.get("type") == "object" and isinstance(properties, dict)
    if is_object and isinstance(properties, dict) and isinstance(required, list):
        candidates += [properties.get(name) for name in required if isinstance(name, str)]
    return (candidate for candidate in candidates if isinstance(candidate, dict))
