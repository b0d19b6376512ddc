r"""Patterns of texts, rewritten to patterns of these texts within JSON's quotes.

JSON escapes the quote, the backslash and control characters; each has one spelling here,
the one of Python's `json`. So a set that holds some of these becomes alternatives:

    [a"\n]   -->   (?:[a]|\\(?:["n]))
"""

import json
from collections.abc import Iterable
from typing import Final

from minfer.effects.text.grammars.character_sets import (
    NO_LINE_END,
    CharacterSet,
    character,
)
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.patterns import pattern_parts, rewrite_pattern

_ESCAPED: Final = frozenset((*range(32), *map(ord, '"\\')))
_ALL: Final = CharacterSet(r"[\x{0}-\x{10FFFF}]", frozenset(range(128)), beyond=True)
_NOT_ESCAPED: Final = r"--[\x{0}-\x{1F}\x{22}\x{5C}]]"


def escape_text(text: str) -> str:
    """A text as it is within JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal(text: str) -> str:
    """A pattern of this text alone."""
    return "".join(map(character, map(ord, text)))


def write_pattern(pattern: str, *, escaped: bool) -> str:
    """A pattern in the compiler's words; with `escaped`, of texts within JSON's quotes.
    Raises GrammarError.
    """
    check_brackets(pattern)
    if not escaped:
        return rewrite_pattern(pattern, escapes=False)
    scopes = _Scopes()
    return "".join([_escaped(part, scopes) for part in pattern_parts(pattern)])


class BracketError(GrammarError):
    """A pattern has a bracket without its other one."""


def check_brackets(pattern: str) -> None:
    """Raise BracketError for a bracket without its other one: a pattern that is put into
    brackets would mean something else. Raises GrammarError for what cannot be enforced,
    and for a set without characters: no text would go on there.
    """
    depth = 0
    for part in pattern_parts(pattern):
        if isinstance(part, CharacterSet) and part.empty:
            raise GrammarError(f"a pattern has a set of no characters: {part.text}")
        if isinstance(part, str):
            depth += _opens(part) - (part == ")")
        if depth < 0:
            raise BracketError("a pattern has a ')' that nothing opens; escape it: \\)")
    if depth:
        raise BracketError("a pattern has a '(' that is not closed; escape it: \\(")


def _opens(part: str) -> bool:
    """Whether a part opens a group: flags for the rest of a group do not."""
    return part.startswith("(") and not part.endswith(")")


class _Scopes:
    """Whether a dot is any character, and whether case is ignored, group by group."""

    def __init__(self) -> None:
        self._outer: list[str] = []
        self.flags = ""

    def read(self, part: str) -> None:
        """Take a part of a pattern."""
        if part == ")":
            self.flags = self._outer.pop()
            return
        if _opens(part):
            self._outer.append(self.flags)
        if part.startswith("(?") and part[-1] in ":)":
            on, _, off = part[2:-1].partition("-")
            self.flags = "".join(set(self.flags + on) - set(off))


def _escaped(part: str | CharacterSet, scopes: _Scopes) -> str:
    if isinstance(part, CharacterSet):
        return _escaped_set(part)
    if part == ".":
        return _escaped_set(_ALL if "s" in scopes.flags else NO_LINE_END)
    for one in '"\\':
        if part == character(ord(one)):
            return _escapes([ord(one)])
    scopes.read(part)
    return part


def _escaped_set(part: CharacterSet) -> str:
    if not part.known:
        why = "can have no property but a general category, such as \\p{Lu}, within JSON"
        raise GrammarError(f"a pattern {why}")
    held = part.ascii & _ESCAPED
    if not held:
        return part.text
    if part.ascii <= _ESCAPED and not part.beyond:
        return _escapes(held)
    return f"(?:[{part.text}{_NOT_ESCAPED}|{_escapes(held)})"


def _escapes(numbers: Iterable[int]) -> str:
    r"""A pattern of the escapes of these characters: `\n` and `\u001f`, never `\N`."""
    letters, digits = "", {"0": "", "1": ""}
    for number in sorted(numbers):
        escape = escape_text(chr(number))
        if len(escape) == 2:
            letters += character(ord(escape[1]))
        else:
            digits[escape[4]] += escape[5]
    ways = [f"[{letters}]"] if letters else []
    ways += [f"u00{high}[{low}]" for high, low in digits.items() if low]
    return rf"(?-i:\x{{5C}}(?:{'|'.join(ways)}))"
