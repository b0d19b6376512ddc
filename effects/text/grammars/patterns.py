r"""Patterns of JSON schemas and regular expressions, rewritten so that the compiler
enforces their meaning.

llguidance 1.9 accepts texts that a pattern forbids, for three reasons:

* Within JSON, a set of characters becomes a set of its escapes. Where it holds all of
  U+0000 to U+001F (U+000A aside), the escapes of `"` and of the backslash are added,
  whether it holds these or not: `[^"]` matches `"`. Alternatives are joined into one set
  before, so this depends on the whole pattern. In such a pattern each set that lacks `"`
  or the backslash loses U+0001: then no join of them holds all.
* It reads sets as Rust does: `[a&&b]` is an intersection, and `\S` and `\W` hold more
  than those of Python's `re`. So each set is written anew, with its characters by number.
  Where `re` and ECMA 262 differ, it holds what both allow; but in a name that decides
  what its value may be it is as `re` has it, so that no name is taken for another one.

* Where a negated set holds U+D7FF and U+E000, which only surrogates are between, the
  compiler allows these two. A range of both makes one range of all that it excludes.

Groups, repetitions and anchors are passed on: the compiler refuses those that it cannot
enforce.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Final
from unicodedata import category

from attrs import evolve

from minfer.effects.text.grammars.character_sets import (
    ALL_CHARACTERS,
    ASCII,
    CONTROLS,
    NO_LINE_END,
    NO_LINE_FEED,
    ONLY_NUMBERED,
    SURROGATE_NEIGHBOURS,
    CharacterSet,
    character,
    holds_all,
    range_text,
)
from minfer.effects.text.grammars.grammar_library import GrammarError

_WITHOUT_LINE_FEED: Final = CONTROLS - {ord("\n")}
_MAX_SHOWN_CHARS: Final = 16  # characters that an error shows
_CHARACTER: Final = r"""
    \\x[0-9A-Fa-f]{2} | \\u[0-9A-Fa-f]{4} | \\U[0-9A-Fa-f]{8}
    | \\[xu]\{[0-9A-Fa-f]{1,6}\}       # a character by its number
    | \\[pP](?:\{[^{}]*\}|[A-Za-z])    # a property of Unicode
    | \\[0-9]{2,}                      # a back-reference, or a number in octal
    | \\.                              # any other escape
    | .
"""
_SET_FLAGS: Final = re.compile(r"\(\?([A-Za-z-]*)[:)]")
_SET_CHARACTER: Final = re.compile(_CHARACTER, re.VERBOSE | re.DOTALL)
_PATTERN_TOKEN: Final = re.compile(
    rf"""
    (?P<repeated>[*+?]|\{{[0-9]*,?[0-9]*\}})
    | (?P<flags>\(\?[A-Za-z-]*[:)])
    | (?P<handed>\(\?(?:P?<\w+>|<?[=!])|[()|.^$])
    | (?P<character>{_CHARACTER})
    """,
    re.VERBOSE | re.DOTALL,
)
_FLAGS: Final = frozenset("is-")
# What `re` takes for another case of other characters than Rust does: sets without one
# case do not hold the others where case is ignored.
_OTHER_CASES: Final = r"\u0130\u0131\u0390\u03B0\u1FD3\u1FE3\uFB05\uFB06"
_NUMBER_OF_ESCAPE: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}
_SPACES: Final = r"\x09-\x0D\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000"
_MORE_SPACES: Final = rf"{_SPACES}\x1C-\x1F\x85\uFEFF"
# Short names of general categories, and of groups of these.
_CATEGORIES: Final = frozenset(
    f"{group}{letter}"
    for group, letters in (
        *(("C", "cfnos"), ("L", "lmotu"), ("M", "cen"), ("N", "dlo")),
        *(("P", "cdefios"), ("S", "ckmo"), ("Z", "lps")),
    )
    for letter in ("", *letters)
)
# Escapes that stand for sets: what both `re` and ECMA 262 mean, and what either does.
_IN_BOTH_DIALECTS: Final = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": _SPACES,
    "D": r"[^\p{Nd}]",
    "W": r"[^\p{L}\p{N}_]",
    "S": f"[^{_MORE_SPACES}]",
}
_IN_EITHER_DIALECT: Final = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{N}_",
    "s": _MORE_SPACES,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": f"[^{_SPACES}]",
}
_IN_RE: Final = {
    **_IN_EITHER_DIALECT,
    "s": rf"{_SPACES}\x1C-\x1F\x85",
    "D": _IN_BOTH_DIALECTS["D"],
    "W": _IN_BOTH_DIALECTS["W"],
    "S": rf"[^{_SPACES}\x1C-\x1F\x85]",
}


def rewrite_pattern(pattern: str, *, decides: bool = False, escapes: bool = True) -> str:
    """A pattern as the compiler is to read it. It `decides` if names that it does not
    match may come, too, and texts have no escapes by number then. What it matches has
    JSON's `escapes`, or is no JSON. Raises GrammarError.
    """
    pieces = [*pattern_pieces(pattern, decides=decides)]
    sets = [char_set for char_set in pieces if isinstance(char_set, CharacterSet)]
    controls = frozenset[int]().union(
        *(char_set.controls for char_set in sets if char_set.may_gain_escapes)
    )
    dropping = escapes and controls >= _WITHOUT_LINE_FEED
    for char_set in sets if decides else ():
        char_set.check_spellable(dropping=dropping)
    return "".join([_final_text(piece, dropping=dropping) for piece in pieces])


def _final_text(piece: str | CharacterSet, *, dropping: bool) -> str:
    if isinstance(piece, str):
        return piece
    return piece.without_dropped() if dropping else piece.text


def pattern_pieces(
    pattern: str, *, decides: bool = False
) -> Iterator[str | CharacterSet]:
    """The sets of a pattern, and the texts between them. Raises GrammarError."""
    position, repeated = 0, False
    flags = "".join(_SET_FLAGS.findall(pattern))
    ignoring, dotall = "i" in flags, "s" in flags
    if ignoring and decides:
        raise refused_part("(?i", "flag")
    while position < len(pattern):
        if pattern[position] == "[":
            char_set, position = _read_set(pattern, position + 1, decides=decides)
            if ignoring and char_set.text.startswith("[^"):
                char_set = evolve(char_set, text=f"[^{_OTHER_CASES}{char_set.text[2:]}")
            repeated = False
            yield char_set
            continue
        if (match := _PATTERN_TOKEN.match(pattern, position)) is None:
            raise AssertionError("it takes any character")
        position = match.end()
        kind = match.lastgroup
        if kind == "repeated" and repeated and match[0] != "?":
            raise refused_part(pattern[position - 2 : position], "repetition")
        if kind == "flags" and not _FLAGS.issuperset(match[0][2:-1]):
            raise refused_part(match[0], "flag")
        if kind == "handed" and match[0] in ("(?<=", "(?<!"):
            raise refused_part(match[0], "look-behind")
        repeated = kind == "repeated"
        if kind == "character":
            yield _character_outside_sets(match[0], decides=decides)
        elif match[0] == "." and not dotall:
            yield NO_LINE_FEED if decides else NO_LINE_END
        elif decides and match[0] == "$":  # `re` finds a last line break after it
            yield from (_character_outside_sets("\n", decides=True), "?$")
        else:
            yield match[0]


def _character_outside_sets(token: str, *, decides: bool) -> str | CharacterSet:
    """A character, or an escape of several, outside of sets."""
    if (char_set := _class_escape(token, negated=False, decides=decides)) is not None:
        return CharacterSet(f"[{char_set.text}]", char_set.ascii, char_set.known)
    number = _number(token, in_set=False)
    if number not in ONLY_NUMBERED | CONTROLS:
        return character(number)
    return CharacterSet(f"[{character(number)}]", frozenset({number}))


def _read_set(pattern: str, position: int, *, decides: bool) -> tuple[CharacterSet, int]:
    """The set after a bracket, and where it ends. A bracket that closes it comes after
    at least one member.
    """
    negated = pattern.startswith("^", position)
    begin = position = position + negated
    members: list[CharacterSet] = []
    tokens = set()
    while position == begin or not pattern.startswith("]", position):
        tokens.add(pattern[position : position + 2])
        member, position = _read_member(
            pattern, position, negated=negated, decides=decides
        )
        members.append(member)
    ranges = [span for member in members for span in member.ranges]
    if any(
        f"\\{letter}" in tokens and f"\\{letter.upper()}" in tokens for letter in "dsw"
    ):
        ranges.append(ALL_CHARACTERS)
    text = "".join([member.text for member in members])
    if not text:  # surrogates alone, of which no text has any
        text, ranges, negated = r"\x{0}-\x{10FFFF}", [ALL_CHARACTERS], not negated
    ascii_held = frozenset[int]().union(*(member.ascii for member in members))
    known = all(member.known for member in members)
    if negated:
        if all(any(number in span for span in ranges) for number in SURROGATE_NEIGHBOURS):
            text += range_text(*SURROGATE_NEIGHBOURS)
        remaining, empty = ASCII - ascii_held, holds_all(ranges)
        return CharacterSet(
            f"[^{text}]", remaining, known, beyond=True, empty=empty
        ), position + 1
    beyond = any(member.beyond for member in members)
    return CharacterSet(f"[{text}]", ascii_held, known, beyond), position + 1


def _read_member(
    pattern: str, position: int, *, negated: bool, decides: bool
) -> tuple[CharacterSet, int]:
    """A member of a set, without its brackets, and where it ends."""
    token, position = _read_token(pattern, position)
    if (char_set := _class_escape(token, negated=negated, decides=decides)) is not None:
        return char_set, position
    low = high = _number(token, in_set=True)
    if pattern.startswith("-", position) and not pattern.startswith("-]", position):
        token, position = _read_token(pattern, position + 1)
        high = _number(token, in_set=True)
    if low > high:
        raise refused_part(f"{chr(low)}-{chr(high)}", "range")
    spanned = range(low, high + 1)
    ascii_held, beyond = ASCII.intersection(spanned), high not in ASCII
    return CharacterSet(
        range_text(low, high), ascii_held, beyond=beyond, ranges=(spanned,)
    ), position


def _read_token(pattern: str, position: int) -> tuple[str, int]:
    """A character, or an escape, within a set, and where it ends."""
    match = _SET_CHARACTER.match(pattern, position)
    if match is None:
        raise GrammarError("a pattern ends within a set: a bracket is not closed")
    return match[0], match.end()


def _class_escape(token: str, *, negated: bool, decides: bool) -> CharacterSet | None:
    """A token for several characters, as members of a set; None if it is one."""
    letter = token[1:2] if token[0] == "\\" else ""
    if letter in ("p", "P"):
        return _property(token)
    if not letter or letter not in _IN_BOTH_DIALECTS:
        return None
    table = _IN_EITHER_DIALECT if negated else _IN_BOTH_DIALECTS
    text = (_IN_RE if decides else table)[letter]
    # Of ASCII, `re` has more spaces than ECMA 262.
    is_unicode = decides or negated != letter.isupper()
    return CharacterSet(text, _ascii_of(token, re.NOFLAG if is_unicode else re.ASCII))


def _property(token: str) -> CharacterSet:
    """A property of Unicode, as a member of a set: which of ASCII have it is known of
    general categories by their short names.
    """
    name = token[2:].strip("{}")
    if name not in _CATEGORIES:
        return CharacterSet(token, frozenset(), known=False, beyond=True)
    members = [
        number
        for number in (*ASCII, *SURROGATE_NEIGHBOURS)
        if category(chr(number)).startswith(name) == (token[1] == "p")
    ]
    ranges = tuple(
        range(number, number + 1) for number in SURROGATE_NEIGHBOURS if number in members
    )
    return CharacterSet(token, ASCII.intersection(members), beyond=True, ranges=ranges)


@cache
def _ascii_of(escape: str, flags: re.RegexFlag) -> frozenset[int]:
    """The ASCII characters that one of the escapes in `_IN_BOTH_DIALECTS` stands for."""
    matches = re.compile(escape, flags).match
    return frozenset(number for number in ASCII if matches(chr(number)))


def _number(token: str, *, in_set: bool) -> int:
    """The character of a token. Raises GrammarError for another escape, such as a
    position or a reference to earlier text.
    """
    if token[0] != "\\":
        return ord(token)
    letter = token[1:2]
    if len(token) > 2 and not letter.isdigit():
        number = int(token[2:].strip("{}"), 16)
        if number <= 0x10FFFF:
            return number
    elif letter == "b" and in_set:
        return ord("\b")
    elif token[1:] in _NUMBER_OF_ESCAPE:
        return _NUMBER_OF_ESCAPE[letter]
    elif letter and not letter.isalnum():
        return ord(letter)
    raise refused_part(token, "escape")


def refused_part(text: str, kind: str) -> GrammarError:
    """The error about a part of a pattern."""
    return GrammarError(
        f"the {kind} {text[:_MAX_SHOWN_CHARS]!r} in a pattern cannot be enforced"
    )
