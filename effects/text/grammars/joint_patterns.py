"""Bounds how many patterns must match one text.

`{"allOf": [{"pattern": P}, {"pattern": Q}, ...]}` is the intersection of languages. The
compiler builds the product of their automata, which takes time exponential in their
number: 16 short patterns take longer than a minute, and its thread cannot be cancelled.
"""

from collections.abc import Callable
from typing import Any, Final

from attrs import define, field

from minfer.effects.text.grammars.grammar_library import KeywordError

MAX_JOINT_PATTERNS: Final = 8
_WORDS: Final = ("allOf", "$ref", "anyOf")  # that add another schema's patterns


@define
class JointPatterns:
    """Counts the patterns of schemas; `target` resolves a reference."""

    target: Callable[[str], Any]
    _counts: dict[int, int] = field(factory=dict, init=False)  # by identity of a schema

    def check(self, schema: dict[str, Any]) -> None:
        """Raise KeywordError if too many patterns must match one text."""
        if self._count(schema) <= MAX_JOINT_PATTERNS:
            return
        self._counts.clear()  # a lenient check changes the schema and asks again
        word = next(word for word in _WORDS if word in schema)
        message = f"more than {MAX_JOINT_PATTERNS} patterns must match one text"
        raise KeywordError(f"{message} by the keyword {word!r}; join them to one", word)

    def _count(self, schema: dict[str, Any]) -> int:
        """The count of a schema, after those of the schemas that it adds."""
        stack, entered = [schema], set[int]()
        while stack:
            current = stack[-1]
            added = [*self._joint(current), *_alternatives(current)]
            if id(current) not in self._counts and id(current) not in entered:
                entered.add(id(current))
                stack += [
                    subschema for subschema in added if id(subschema) not in entered
                ]
                continue
            stack.pop()
            if id(current) not in self._counts:
                self._counts[id(current)] = self._sum(current)
        return self._counts[id(schema)]

    def _sum(self, schema: dict[str, Any]) -> int:
        # A schema that is an alternative within itself adds nothing there.
        joint = sum(
            self._counts.get(id(subschema), 0) for subschema in self._joint(schema)
        )
        counts = (
            self._counts.get(id(subschema), 0) for subschema in _alternatives(schema)
        )
        own_pattern = int(isinstance(schema.get("pattern"), str))
        return own_pattern + joint + max(counts, default=0)

    def _joint(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The schemas that must hold beside a schema's own keywords."""
        reference, subschemas = schema.get("$ref"), schema.get("allOf")
        joint = [self.target(reference)] if isinstance(reference, str) else []
        joint += subschemas if isinstance(subschemas, list) else []
        return [subschema for subschema in joint if isinstance(subschema, dict)]


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    subschemas = schema.get("anyOf")
    listed = subschemas if isinstance(subschemas, list) else []
    return [subschema for subschema in listed if isinstance(subschema, dict)]
