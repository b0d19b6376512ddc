"""What grammars of arguments share: the rules, and the properties of a schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import json_rule
from minfer.effects.text.tools.marker_rules import MarkerRules
from minfer.effects.text.tools.offered import resolve

DEFINITIONS: Final = ("$defs", "definitions")
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "$comment"}
)
_OBJECT_KEYWORDS: Final = ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
}


@frozen
class ArgumentRules:
    """The grammar of one tool's arguments."""

    body: str  # of a rule
    rules: tuple[str, ...] = ()  # that it needs
    shared: tuple[str, ...] = ()  # likewise, and other tools do, too


@frozen(kw_only=True)
class ArgumentSchema:
    """The schema of a tool's arguments, whose grammar is wanted."""

    tool: str  # its name
    number: int  # among the tools
    root: Mapping[str, Any]
    marks: MarkerRules
    # Parts that cannot be enforced are left free; else they raise GrammarError.
    lenient: bool = False


@frozen
class Property:
    """A property of an object."""

    key: str
    schema: Any
    required: bool


def properties_of(
    path: str,
    schema: Mapping[str, Any],
    not_in_keys: frozenset[str],
    *,
    lenient: bool,
) -> list[Property] | None:
    """The properties of an object; None if it may have any. Raises GrammarError for what
    cannot be enforced; with `lenient`, that is left free as far as it can be.
    """
    unsupported = sorted(schema.keys() - _OBJECT_KEYWORDS.union(DEFINITIONS))
    if unsupported and not lenient:
        raise GrammarError(
            f"{path}: {unsupported[0]!r} cannot be enforced in this format"
        )
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    if undeclared := [key for key in required if key not in properties]:
        reason = f"{undeclared[0]!r} is required, and not among the properties"
        raise GrammarError(f"{path}: {reason}, which cannot be enforced in this format")
    if not properties and schema.get("additionalProperties") is not False:
        return None
    for key in properties:
        if set(key) & not_in_keys:
            raise GrammarError(f"{path}: {key!r} cannot be a name in this format")
    return [
        Property(key, subschema, key in required) for key, subschema in properties.items()
    ]


def separated(
    name: str, elements: Sequence[tuple[str, bool]], separator: str
) -> ArgumentRules:
    """Parts in their order with a separator between two, each with whether it is
    required: the others may be left out. The rules are named after `name`.
    """
    rules, firsts = [], []
    for index, (element, required) in enumerate(elements):
        next_element = (
            f"{separator} {element}" if required else f"({separator} {element})?"
        )
        rules.append(f"{name}_from_{index}: {next_element} {name}_from_{index + 1}")
    rules.append(f'{name}_from_{len(elements)}: ""')
    for index, (element, required) in enumerate(elements):
        firsts.append(f"{element} {name}_from_{index + 1}")
        if required:
            break
    else:
        firsts.append('""')
    return ArgumentRules(f"({' | '.join(firsts)})", tuple(rules))


def json_value(schema: Any, root: Mapping[str, Any]) -> str:
    """A rule of a JSON value that matches a schema within `root`."""
    shared = {name: root[name] for name in DEFINITIONS if name in root}
    full_schema = {**shared, **schema} if isinstance(schema, Mapping) else schema
    return json_rule(json.dumps(full_schema))


def listed_texts(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The strings of an `enum` or `const`; None if there is neither."""
    resolved = resolve(schema, root)
    if not isinstance(resolved, Mapping) or not resolved.keys() & {"enum", "const"}:
        return None
    values = resolved.get("enum", [resolved.get("const")])
    return [value for value in values if isinstance(value, str)]


def branches(schema: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """A schema, or its alternatives."""
    resolved = resolve(schema, root)
    alternatives = resolved.get("anyOf") if isinstance(resolved, Mapping) else None
    if alternatives is None:
        yield resolved
        return
    for alternative in alternatives:
        yield resolve(alternative, root)


def is_free_text(schema: Any) -> bool:
    """Whether any text matches."""
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type", "string")
    text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    return text and not schema.keys() - ANNOTATIONS - {"type"}
