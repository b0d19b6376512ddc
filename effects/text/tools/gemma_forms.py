"""Grammars of arguments in Gemma's notation that match a schema:
`{city:<|"|>Zürich<|"|>,days:3}`.

Properties come in the schema's order. A text is any, or one of an enumeration; other
keywords for texts, lists and nested objects cannot be enforced here.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import quote
from minfer.effects.text.tools.argument_rules import (
    ANNOTATIONS,
    ArgumentRules,
    ArgumentSchema,
    branches,
    is_free_text,
    json_value,
    listed_texts,
    properties_of,
    separated,
)
from minfer.effects.text.tools.marker_rules import MarkerRules
from minfer.effects.text.tools.offered import may_be_text, resolve

_NOT_IN_KEYS: Final = frozenset(':,{}[]<>"\n')
_MAX_DEPTH: Final = 8  # levels of objects and lists whose schemas are followed
_ANY: Final = "gemma_any"
_ANY_OBJECT: Final = "gemma_object"
_TEXT: Final = "gemma_text"
_LIST_KEYWORDS: Final = ANNOTATIONS | {"type", "items"}


def gemma_form(arguments: ArgumentSchema, quote_mark: str) -> ArgumentRules:
    """The rules of a tool's arguments. Raises GrammarError."""
    root, marks = arguments.root, arguments.marks
    builder = _Builder(
        f"gemma_{arguments.number}", root, marks.rule(quote_mark), arguments.lenient
    )
    body = builder.object(root, arguments.tool, 0)
    return ArgumentRules(body, tuple(builder.rules), _shared_rules(marks, quote_mark))


def _shared_rules(marks: MarkerRules, quote_mark: str) -> tuple[str, ...]:
    """The rules of any value."""
    items = f'({_ANY} ("," {_ANY})*)?'
    pairs = '(gemma_pair ("," gemma_pair)*)?'
    plain = json_value({"type": ["number", "boolean", "null"]}, {})
    return (
        *marks.ending("gemma_string_end", quote_mark),
        f"{_TEXT}: {marks.rule(quote_mark)} gemma_string_end",
        f'gemma_pair: /[A-Za-z0-9_ .-]+/ ":" {_ANY}',
        f'{_ANY_OBJECT}: "{{" {pairs} "}}"',
        f'{_ANY}: {_TEXT} | {_ANY_OBJECT} | "[" {items} "]" | {plain}',
    )


@define
class _Builder:
    """Makes the rules of one tool."""

    prefix: str
    root: Mapping[str, Any]
    quote_mark: str  # as a part of a rule
    lenient: bool
    rules: list[str] = field(factory=list)

    def object(self, schema: Mapping[str, Any], path: str, level: int) -> str:
        """The body of a rule of an object."""
        try:
            properties = properties_of(path, schema, _NOT_IN_KEYS, lenient=self.lenient)
        except GrammarError:
            if not self.lenient:
                raise
            properties = None
        if properties is None:
            return _ANY_OBJECT
        elements = []
        for member in properties:
            value = self.value(member.schema, f"{path}.{member.key}", level + 1)
            rule = self._rule(f"{quote(f'{member.key}:')} {value}")
            elements.append((rule, member.required))
        form = separated(f"{self.prefix}_{len(self.rules)}", elements, quote(","))
        self.rules += form.rules
        return f'"{{" {form.body} "}}"'

    def value(self, schema: Any, path: str, level: int) -> str:
        """The body of a rule of a value."""
        alternatives = [
            self._branch_rule(branch, path, level)
            for branch in branches(schema, self.root)
        ]
        return f"({' | '.join(dict.fromkeys(alternatives))})"

    def _branch_rule(self, schema: Any, path: str, level: int) -> str:
        resolved = resolve(schema, self.root)
        kind = resolved.get("type") if isinstance(resolved, Mapping) else None
        if kind == "object" and level < _MAX_DEPTH:
            return self._rule(self.object(resolved, path, level))
        if kind == "array" and level < _MAX_DEPTH:
            if not self.lenient and (
                unsupported := sorted(resolved.keys() - _LIST_KEYWORDS)
            ):
                raise GrammarError(
                    f"{path}: {unsupported[0]!r} cannot be enforced in this format"
                )
            item = self._rule(self.value(resolved.get("items", True), path, level + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if may_be_text(resolved, self.root):
            return self._text(resolved, path)
        if kind in ("object", "array") or not isinstance(resolved, Mapping):
            return _ANY
        return json_value(resolved, self.root)

    def _text(self, schema: Any, path: str) -> str:
        texts = listed_texts(schema, self.root)
        if texts is not None:
            alternatives = " | ".join(map(quote, texts))
            return f"{self.quote_mark} ({alternatives}) {self.quote_mark}"
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            if not self.lenient and not is_free_text(schema):
                raise GrammarError(f"{path}: a text cannot be bound in this format")
            return _TEXT
        return _ANY

    def _rule(self, body: str) -> str:
        name = f"{self.prefix}_rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name
