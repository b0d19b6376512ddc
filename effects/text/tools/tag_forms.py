"""Grammars of arguments in tags that match a schema.

    <parameter=KEY>
    VALUE
    </parameter>

Parameters come in the schema's order; those that are not required may be left out, and
the schema's are the only ones. A value that may be text is any text, or one of an
enumeration; other values are JSON. Other keywords for a text cannot be enforced here, and
neither can those for an object as a whole.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import quote
from minfer.effects.text.tools.argument_rules import (
    ArgumentRules,
    ArgumentSchema,
    branches,
    is_free_text,
    json_value,
    listed_texts,
    properties_of,
)
from minfer.effects.text.tools.marker_rules import MarkerRules
from minfer.effects.text.tools.offered import may_be_text

_NOT_IN_KEYS: Final = frozenset('<>"\n')
_ANY: Final = "tagged_any"
_TEXT: Final = "tagged_text"
_KEY: Final = "/[A-Za-z0-9_.-]+/"


@frozen
class _TagRules:
    """The tags around a value, in a grammar."""

    marks: MarkerRules
    around: str  # as in `CallForm.parameter`

    def before(self, key: str, *, text: bool) -> str:
        """The tag before the value of a parameter."""
        return self.marks.rule(self._before(text=text).replace("{key}", key))

    def before_any(self) -> str:
        """The tag before a text, of any name."""
        first, _, rest = self._before(text=True).partition("{key}")
        return f"{self.marks.rule(first)} {_KEY} {self.marks.rule(rest)}"

    @property
    def after(self) -> str:
        """The text after a value."""
        return self.around.partition("{value}")[2]

    def _before(self, *, text: bool) -> str:
        head = self.around.partition("{value}")[0]
        return head.replace("{kind}", "true" if text else "false")


def tag_form(arguments: ArgumentSchema, around: str) -> ArgumentRules:
    """The rules of a tool's arguments in tags, which are `around` each value. Raises
    GrammarError.
    """
    marks = arguments.marks
    tags = _TagRules(marks, around)
    shared = (
        *marks.ending(_TEXT, tags.after),
        f"{_ANY}: ({tags.before_any()} {_TEXT})*",
    )
    try:
        body, rules = _body(arguments, tags)
    except GrammarError:
        if not arguments.lenient:
            raise
        body, rules = _ANY, []
    return ArgumentRules(body, tuple(rules), shared)


def _body(arguments: ArgumentSchema, tags: _TagRules) -> tuple[str, list[str]]:
    name, root, lenient = arguments.tool, arguments.root, arguments.lenient
    properties = properties_of(name, root, _NOT_IN_KEYS, lenient=lenient)
    if properties is None:
        return _ANY, []
    parameters, rules = [], []
    for index, parameter in enumerate(properties):
        rule = f"tagged_{arguments.number}_{index}"
        path = f"{name}.{parameter.key}"
        head = tags.before(parameter.key, text=may_be_text(parameter.schema, root))
        value = _value(parameter.schema, root, path, tags, lenient=lenient)
        rules.append(f"{rule}: {head} {value}")
        parameters.append(rule if parameter.required else f"{rule}?")
    return " ".join(parameters) or '""', rules


def _value(
    schema: Any, root: Mapping[str, Any], path: str, tags: _TagRules, *, lenient: bool
) -> str:
    """A rule of a value, and the tag after it."""
    after = tags.marks.rule(tags.after)
    if may_be_text(schema, root):
        texts = listed_texts(schema, root)
        if texts is not None:
            return f"({' | '.join(map(quote, texts))}) {after}"
        if not lenient and not any(map(is_free_text, branches(schema, root))):
            raise GrammarError(f"{path}: a text cannot be bound in this format")
        return _TEXT
    return f"{json_value(schema, root)} {after}"
