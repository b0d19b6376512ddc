"""Grammars of arguments in Python's notation, `city="Zürich", days=3`, that match a
schema.

They come in the schema's order. True, False and None are Python's words; other values are
JSON, which Python reads, too.
"""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import json_rule, quote
from minfer.effects.text.tools.argument_rules import (
    ArgumentRules,
    ArgumentSchema,
    json_value,
    properties_of,
    separated,
)
from minfer.effects.text.tools.offered import resolve

# Characters that no name of an argument has; there are more, which are no problem here.
_NOT_IN_KEYS: Final = frozenset(" -=()[]{},.\"'\n")
_ANY: Final = "python_any"
_WORDS: Final = {"boolean": ("True", "False"), "null": ("None",)}


def python_form(arguments: ArgumentSchema) -> ArgumentRules:
    """The rules of a tool's arguments. Raises GrammarError."""
    item = f"/[A-Za-z_][A-Za-z0-9_]*/ {quote('=')} {json_rule('{}')}"
    shared = (f'{_ANY}: (python_item (", " python_item)*)?', f"python_item: {item}")
    root, number = arguments.root, arguments.number
    try:
        properties = properties_of(
            arguments.tool, root, _NOT_IN_KEYS, lenient=arguments.lenient
        )
    except GrammarError:
        if not arguments.lenient:
            raise
        properties = None
    if properties is None:
        return ArgumentRules(_ANY, (), shared)
    elements, rules = [], []
    for index, member in enumerate(properties):
        rule = f"python_{number}_{index}"
        rules.append(f"{rule}: {quote(f'{member.key}=')} {_value(member.schema, root)}")
        elements.append((rule, member.required))
    form = separated(f"python_{number}", elements, quote(", "))
    return ArgumentRules(form.body, (*rules, *form.rules), shared)


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A rule of a value."""
    resolved = resolve(schema, root)
    kind = resolved.get("type") if isinstance(resolved, Mapping) else None
    words = _WORDS.get(kind) if isinstance(kind, str) else None
    if words and not resolved.keys() & {"enum", "const"}:
        return f"({' | '.join(map(quote, words))})"
    return json_value(schema, root)
