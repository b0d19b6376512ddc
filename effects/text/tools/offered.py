"""The tools that an answer may call, as far as a reader needs them.

Formats with arguments in JSON show the type of each. Others have the bare text of a
parameter; only the tool's schema determines whether `5` is a number.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

Tools = Mapping[str, Mapping[str, Any] | None]  # schemas of parameters, by name
_MAX_DEPTH: Final = 8  # references that are followed, and levels of choices
_COMBINATORS: Final = ("anyOf", "oneOf", "allOf")


@frozen
class OfferedTools:
    """The tools that may be called."""

    names: frozenset[str] = frozenset()
    # Parameters that are no text, each after its tool, and those that are text or null.
    typed: frozenset[tuple[str, str]] = frozenset()
    nullable: frozenset[tuple[str, str]] = frozenset()


def typed_parameters(tools: Tools) -> Iterator[tuple[str, str]]:
    """The parameters that cannot be text, by their schemas."""
    for name, schema in tools.items():
        properties = (schema or {}).get("properties")
        if isinstance(properties, Mapping):
            for key, subschema in properties.items():
                if not may_be_text(subschema, schema):
                    yield name, key


def typed_paths(tools: Tools) -> Iterator[tuple[str, str]]:
    """The parameters that cannot be text, and what is in objects and lists that cannot:
    `key/key`, and `key/item` for the items of a list.
    """
    for name, schema in tools.items():
        for path in _typed_paths_below(schema, schema, "", 0):
            yield name, path


def _typed_paths_below(schema: Any, root: Any, parent: str, depth: int) -> Iterator[str]:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    properties = schema.get("properties")
    subschemas = dict(properties) if isinstance(properties, Mapping) else {}
    if "items" in schema:
        subschemas["item"] = schema["items"]
    for key, subschema in subschemas.items():
        path = f"{parent}/{key}" if parent else key
        if not may_be_text(subschema, root):
            yield path
        yield from _typed_paths_below(subschema, root, path, depth + 1)


def nullable_parameters(tools: Tools) -> Iterator[tuple[str, str]]:
    """The parameters that can be text or null, by their schemas."""
    for name, schema in tools.items():
        properties = (schema or {}).get("properties")
        if isinstance(properties, Mapping):
            for key, subschema in properties.items():
                if may_be_text(subschema, schema) and may_be_null(subschema, schema):
                    yield name, key


def may_be_null(schema: Any, root: Any, depth: int = 0) -> bool:
    """Whether the schema names null as a value."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return False
    if schema.get("nullable") is True:
        return True
    kinds = schema.get("type")
    if "null" in (kinds if isinstance(kinds, list) else [kinds]):
        return True
    if isinstance(values := schema.get("enum"), list) and None in values:
        return True
    choice_lists = (schema.get(name) for name in _COMBINATORS)
    all_choices = [
        choice
        for choices in choice_lists
        if isinstance(choices, list)
        for choice in choices
    ]
    return any(may_be_null(choice, root, depth + 1) for choice in all_choices)


def may_be_text(schema: Any, root: Any, depth: int = 0) -> bool:
    """Whether a string may match; a schema that is not understood counts as text."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return True
    if (kinds := schema.get("type")) is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    for name in _COMBINATORS:
        if isinstance(choices := schema.get(name), list):
            return any(may_be_text(choice, root, depth + 1) for choice in choices)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, str) for value in values)
    return "const" not in schema or isinstance(schema["const"], str)


def resolve(schema: Any, root: Any) -> Any:
    """A schema, or the one it refers to; None if that does not exist."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _follow_reference(schema["$ref"], root)
    return None


def _follow_reference(reference: Any, root: Any) -> Any:
    """The target of a reference within the schema, if it exists."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root
