"""Grammars of arguments in tags, the format of Qwen's coders, that match a schema.

    <parameter=KEY>
    VALUE
    </parameter>

Parameters come in the schema's order; those that are not required may be left out, and
the schema's are the only ones. A value that may be text is any text, or one of an
enumeration; other values are JSON. Other keywords for a text cannot be enforced here, and
neither can those for an object as a whole.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import TEXT, json_rule, quote
from minfer.effects.text.tools.offered import may_be_text, resolve

_ENDS: Final = "\n</parameter>\n"
_DEFINITIONS: Final = ("$defs", "definitions")
_SAID: Final = frozenset({"title", "description", "default", "examples", "$comment"})
_OBJECT: Final = _SAID | {"type", "properties", "required", "additionalProperties"}
_NOT_IN_KEYS: Final = frozenset("<>\n")
_ANY: Final = "tagged_any"
SHARED: Final = (  # rules that all tools use
    f"tagged_text[lazy]: /{TEXT}/ {quote(_ENDS)}",
    f'{_ANY}: ("<parameter=" /[A-Za-z0-9_.-]+/ ">\\n" tagged_text)*',
)


@frozen
class Tagged:
    """The grammar of one tool's arguments."""

    body: str  # of a rule
    rules: tuple[str, ...] = ()  # that it needs


def tag_form(name: str, number: int, schema: str, *, lenient: bool = False) -> Tagged:
    """The arguments of the tool of this number. Raises GrammarError for a schema that
    cannot be enforced; with `lenient`, that part is left free.
    """
    try:
        return _tag_form(name, number, json.loads(schema), lenient=lenient)
    except GrammarError:
        if lenient:
            return Tagged(_ANY)
        raise


def _tag_form(
    name: str, number: int, root: Mapping[str, Any], *, lenient: bool
) -> Tagged:
    odd = sorted(root.keys() - _OBJECT.union(_DEFINITIONS))
    if odd and not lenient:
        raise GrammarError(f"{name}: {odd[0]!r} cannot be enforced in this format")
    properties = root.get("properties", {})
    required = root.get("required", ())
    if unknown := [key for key in required if key not in properties]:
        why = f"{unknown[0]!r} is required, and not among the properties"
        raise GrammarError(f"{name}: {why}, which cannot be enforced in this format")
    if not properties and root.get("additionalProperties") is not False:
        return Tagged(_ANY)
    parts, rules = [], []
    for at, (key, one) in enumerate(properties.items()):
        if set(key) & _NOT_IN_KEYS:
            raise GrammarError(f"{name}: {key!r} cannot be a name in this format")
        rule = f"tagged_{number}_{at}"
        head = quote(f"<parameter={key}>\n")
        value = _value(one, root, f"{name}.{key}", lenient=lenient)
        rules.append(f"{rule}: {head} {value}")
        parts.append(rule if key in required else f"{rule}?")
    return Tagged(" ".join(parts), tuple(rules))


def _value(schema: Any, root: Mapping[str, Any], where: str, *, lenient: bool) -> str:
    """A rule of a value, and the tag after it."""
    if may_be_text(schema, root):
        texts = _listed(schema, root)
        if texts is not None:
            return f"({' | '.join(map(quote, texts))}) {quote(_ENDS)}"
        if not lenient and not any(map(_is_free, _branches(schema, root))):
            raise GrammarError(f"{where}: a text cannot be bound in this format")
        return "tagged_text"
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    return f"{json_rule(json.dumps({**shared, **schema}))} {quote(_ENDS)}"


def _listed(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The only texts that are allowed, if they are enumerated."""
    one = resolve(schema, root)
    if not isinstance(one, Mapping) or not one.keys() & {"enum", "const"}:
        return None
    values = one.get("enum", [one.get("const")])
    return [value for value in values if isinstance(value, str)]


def _branches(schema: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """A schema, or its alternatives."""
    one = resolve(schema, root)
    several = one.get("anyOf") if isinstance(one, Mapping) else None
    if several is None:
        yield one
        return
    for part in several:
        yield resolve(part, root)


def _is_free(schema: Any) -> bool:
    """Whether any text matches."""
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type", "string")
    text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    return text and not schema.keys() - _SAID - {"type"}
