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
from minfer.effects.text.grammars.patterns import pattern_pieces, rewrite_pattern

_ESCAPED: Final = frozenset((*range(32), *map(ord, '"\\')))
_ANY_CHARACTER: Final = CharacterSet(
    r"[\x{0}-\x{10FFFF}]", frozenset(range(128)), beyond=True
)
_NOT_ESCAPED: Final = r"--[\x{0}-\x{1F}\x{22}\x{5C}]]"


def escape_text(text: str) -> str:
    """A text as it is within JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal_pattern(text: str) -> str:
    """A pattern of this text alone."""
    return "".join(map(character, map(ord, text)))


def write_pattern(pattern: str, *, escaped: bool) -> str:
    """A pattern in the compiler's words; with `escaped`, of texts within JSON's quotes.
    Raises GrammarError.
    """
    check_brackets(pattern)
    if not escaped:
        return rewrite_pattern(pattern, escapes=False)
    scopes = _FlagScopes()
    return "".join([_escape_piece(piece, scopes) for piece in pattern_pieces(pattern)])


class BracketError(GrammarError):
    """A pattern has a bracket without its other one."""


def check_brackets(pattern: str) -> None:
    """Raise BracketError for a bracket without its other one: a pattern that is put into
    brackets would mean something else. Raises GrammarError for what cannot be enforced,
    and for a set without characters: no text would go on there.
    """
    depth = 0
    for piece in pattern_pieces(pattern):
        if isinstance(piece, CharacterSet) and piece.empty:
            raise GrammarError(f"a pattern has a set of no characters: {piece.text}")
        if isinstance(piece, str):
            depth += _opens_group(piece) - (piece == ")")
        if depth < 0:
            raise BracketError("a pattern has a ')' that nothing opens; escape it: \\)")
    if depth:
        raise BracketError("a pattern has a '(' that is not closed; escape it: \\(")


def _opens_group(piece: str) -> bool:
    """Whether a part opens a group: flags for the rest of a group do not."""
    return piece.startswith("(") and not piece.endswith(")")


class _FlagScopes:
    """Whether a dot is any character, and whether case is ignored, group by group."""

    def __init__(self) -> None:
        self._outer: list[str] = []
        self.flags = ""

    def read(self, piece: str) -> None:
        """Take a part of a pattern."""
        if piece == ")":
            self.flags = self._outer.pop()
            return
        if _opens_group(piece):
            self._outer.append(self.flags)
        if piece.startswith("(?") and piece[-1] in ":)":
            on, _, off = piece[2:-1].partition("-")
            self.flags = "".join(set(self.flags + on) - set(off))


def _escape_piece(piece: str | CharacterSet, scopes: _FlagScopes) -> str:
    if isinstance(piece, CharacterSet):
        return _escape_set(piece)
    if piece == ".":
        return _escape_set(_ANY_CHARACTER if "s" in scopes.flags else NO_LINE_END)
    for char in '"\\':
        if piece == character(ord(char)):
            return _escape_alternatives([ord(char)])
    scopes.read(piece)
    return piece


def _escape_set(char_set: CharacterSet) -> str:
    if not char_set.known:
        reason = (
            "can have no property but a general category, such as \\p{Lu}, within JSON"
        )
        raise GrammarError(f"a pattern {reason}")
    escaped_numbers = char_set.ascii & _ESCAPED
    if not escaped_numbers:
        return char_set.text
    if char_set.ascii <= _ESCAPED and not char_set.beyond:
        return _escape_alternatives(escaped_numbers)
    return f"(?:[{char_set.text}{_NOT_ESCAPED}|{_escape_alternatives(escaped_numbers)})"


def _escape_alternatives(numbers: Iterable[int]) -> str:
    r"""A pattern of the escapes of these characters: `\n` and `\u001f`, never `\N`."""
    letters, digits = "", {"0": "", "1": ""}
    for number in sorted(numbers):
        escape = escape_text(chr(number))
        if len(escape) == 2:
            letters += character(ord(escape[1]))
        else:
            digits[escape[4]] += escape[5]
    alternatives = [f"[{letters}]"] if letters else []
    alternatives += [f"u00{high}[{low}]" for high, low in digits.items() if low]
    return rf"(?-i:\x{{5C}}(?:{'|'.join(alternatives)}))"
