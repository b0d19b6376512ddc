"""Translates patterns with look-aheads to patterns without them.

The compiler does not support look-aheads. A look-ahead restricts the rest of the text: it
becomes an intersection of the language of the rest with that of the look-ahead, or with
its complement (`languages.py`). At the top level, an intersection becomes several
patterns, all of which must match. Within a pattern it is computed.

A character class that is required has only the characters of both `re` and ECMA 262; one
that is forbidden has those of either.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from attrs import define, field

from minfer.effects.text.grammars.automata import MAX_PATTERN_CHARS, pattern_of
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.languages import (
    NON_ASCII,
    Language,
    Languages,
    nested_sets,
    too_large_error,
)
from minfer.effects.text.grammars.pattern_reader import (
    Assertion,
    Chars,
    Group,
    PatternItem,
    PatternReader,
    Repeated,
    has_assertion,
    pattern_item_error,
)

_LOOKAHEAD: Final = re.compile(r"\(\?[=!]")


@lru_cache(maxsize=256)
def without_lookaheads(pattern: str) -> tuple[str, ...]:
    """Returns patterns that together match the same texts as `pattern`. Raises
    GrammarError for look-aheads that cannot be translated.
    """
    if _LOOKAHEAD.search(pattern) is None:
        return (pattern,)
    languages, language = _translate(pattern)
    operands = language.operands if language.kind == "and" else (language,)
    return tuple(f"^(?:{pattern_of(languages, operand)})$" for operand in operands)


@lru_cache(maxsize=256)
def as_one_pattern(*patterns: str) -> str:
    """One pattern without look-aheads, which matches where all of these do. Raises
    GrammarError.
    """
    if len(patterns) == 1 and _LOOKAHEAD.search(patterns[0]) is None:
        return patterns[0]
    languages, language = _translate(*patterns)
    return f"^(?:{pattern_of(languages, language)})$"


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches anywhere in a text, in time linear in the text's length.
    Raises GrammarError if that cannot be decided.
    """
    languages, language = _translate(pattern)
    if any(char_set.text for char_set in nested_sets(language)):
        raise GrammarError("a pattern of names has characters beyond ASCII")
    for char in text:
        language = languages.derivative(
            language, 1 << ord(char) if char.isascii() else NON_ASCII
        )
    return language.nullable


def _translate(*patterns: str) -> tuple[Languages, Language]:
    if sum(map(len, patterns)) > MAX_PATTERN_CHARS:
        raise too_large_error()
    translation = _Translation()
    groups = [PatternReader(pattern).read() for pattern in patterns]
    return translation.languages, translation.languages.intersection(
        map(translation.anywhere, groups)
    )


@define
class _Translation:
    """Makes languages of groups."""

    languages: Languages = field(factory=Languages)

    def anywhere(self, group: Group) -> Language:
        """The texts in which a group matches anywhere."""
        everything = self.languages.everything
        result = []
        for items in group.alternatives:
            is_anchored = bool(items) and items[0] == Assertion("^")
            matched = _at_beginning(items) if is_anchored else items
            language = self._sequence(matched, everything, forbidden=False)
            result.append(
                language
                if is_anchored
                else self.languages.concatenate(everything, language)
            )
        return self.languages.union(result)

    def _sequence(
        self, items: Sequence[PatternItem], rest: Language, *, forbidden: bool
    ) -> Language:
        """Texts of the items, and then of the rest."""
        for item in reversed(items):
            rest = self._item_then(item, rest, forbidden=forbidden)
        return rest

    def _item_then(
        self, item: PatternItem, rest: Language, *, forbidden: bool
    ) -> Language:
        """Texts of an item, and then of the rest."""
        languages = self.languages
        match item:
            case Assertion("$"):
                return languages.intersection([rest, languages.empty])
            case Assertion("^"):
                raise pattern_item_error("^", "anchor")
            case Assertion(kind, group) if group is not None:
                is_negative = kind == "!"
                ahead = self._alternatives(
                    group, languages.everything, forbidden=forbidden != is_negative
                )
                return languages.intersection(
                    [rest, languages.complement(ahead) if is_negative else ahead]
                )
            case Group() if has_assertion(item):
                return self._alternatives(item, rest, forbidden=forbidden)
            case Repeated(group, 0, 1) if has_assertion(group):
                with_item = self._item_then(group, rest, forbidden=forbidden)
                return languages.union([with_item, rest])
            case Repeated(group, _, _) if has_assertion(group):
                raise pattern_item_error("(?", "repetition")
        return languages.concatenate(
            self._without_assertions(item, forbidden=forbidden), rest
        )

    def _alternatives(self, group: Group, rest: Language, *, forbidden: bool) -> Language:
        return self.languages.union(
            self._sequence(items, rest, forbidden=forbidden)
            for items in group.alternatives
        )

    def _without_assertions(self, item: PatternItem, *, forbidden: bool) -> Language:
        """The texts of an item without assertions."""
        languages = self.languages
        match item:
            case Chars():
                if item.in_both is None:
                    return languages.chars(0, item.text)
                return languages.chars(item.in_either if forbidden else item.in_both)
            case Repeated():
                language = self._without_assertions(item.item, forbidden=forbidden)
                return languages.repeat(language, item.min_count, item.max_count)
            case Group():
                return self._alternatives(item, languages.empty, forbidden=forbidden)
        raise AssertionError("assertions are handled before")


def _at_beginning(items: Sequence[PatternItem]) -> tuple[PatternItem, ...]:
    """Items at the beginning of a text, without the anchors that hold there."""
    result: list[PatternItem] = []
    for index, item in enumerate(items):
        if not isinstance(item, Assertion) or item.kind == "$":
            return (*result, *items[index:])
        if item.group is not None:
            group = Group(tuple(map(_at_beginning, item.group.alternatives)))
            result.append(Assertion(item.kind, group))
    return tuple(result)
