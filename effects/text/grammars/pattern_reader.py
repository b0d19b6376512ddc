"""Parses patterns to trees: groups of alternatives, each a sequence of items.

Beyond ASCII, `\\d`, `\\w` and `\\s` differ between `re` and ECMA 262. So a character set
has two bit masks: the characters that both include, and those that either includes.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import define, frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.languages import ALL_CHARS, NON_ASCII, too_large_error

MAX_DEPTH: Final = 20  # groups within each other
_MAX_DIGITS: Final = 9  # of a number of repetitions
_TOKEN: Final = re.compile(
    r"""
    (?P<times>[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??
    | (?P<open>\((?:\?(?:s?:|[=!]|P?<[A-Za-z_]\w*>))?)
    | (?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    | (?P<escape>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^{}]*\}|u\{[^{}]*\}|.))
    | (?P<character>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_SET_TOKEN: Final = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^{}]*\}|u\{[^{}]*\}|.)|.", re.DOTALL
)
_NUMBER_OF_ESCAPE: Final = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}
_NO_LINE_END: Final = r"[^\n\r\u2028\u2029]"


def _bits(numbers: Sequence[int]) -> int:
    return sum(1 << number for number in numbers)


_CLASSES: Final = {
    "d": _bits(range(48, 58)),
    "w": _bits([*range(48, 58), *range(65, 91), 95, *range(97, 123)]),
    "s": _bits([*range(9, 14), 32]),
}
_LINE_ENDS: Final = _bits([10, 13])


@frozen
class Chars:
    """A set of characters: `in_both` has those of both dialects, `in_either` those of
    either. If `in_both` is None, the set is given by `text` only, as it is not of ASCII
    alone.
    """

    text: str
    in_both: int | None
    in_either: int = 0


@frozen
class Assertion:
    """A look-ahead, a beginning or an end."""

    kind: str  # "=", "!", "^" or "$"
    group: "Group | None" = None


@frozen
class Group:
    """Alternatives, each a sequence."""

    alternatives: tuple[tuple["PatternItem", ...], ...]


@frozen
class Repeated:
    """An item, several times."""

    item: "PatternItem"
    min_count: int
    max_count: int | None


PatternItem = Chars | Assertion | Group | Repeated


@define
class PatternReader:
    """Reads a pattern."""

    _text: str
    _position: int = 0
    _depth: int = 0
    _dot_matches_all: bool = False  # whether a dot is any character

    def read(self) -> Group:
        """The whole pattern. Raises GrammarError."""
        group = self._group()
        if self._position < len(self._text):
            raise pattern_item_error(self._text[self._position :], "bracket")
        return group

    def _group(self) -> Group:
        """Alternatives, up to a bracket that closes them."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_large_error()
        alternatives: list[tuple[PatternItem, ...]] = []
        items: list[PatternItem] = []
        while (match := _TOKEN.match(self._text, self._position)) and match[0] != ")":
            self._position = match.end()
            if match[0] == "|":
                alternatives.append(tuple(items))
                items = []
            elif match.lastgroup == "times":
                if not items or isinstance(items[-1], Assertion | Repeated):
                    raise pattern_item_error(match[0], "repetition")
                items.append(Repeated(items.pop(), *_read_repetition(match["times"])))
            else:
                items.append(self._item(match))
        self._depth -= 1
        return Group((*alternatives, tuple(items)))

    def _item(self, match: re.Match[str]) -> PatternItem:
        text = match[0]
        match match.lastgroup:
            case "open":
                outer_any, self._dot_matches_all = (
                    self._dot_matches_all,
                    self._dot_matches_all or text == "(?s:",
                )
                group = self._group()
                self._dot_matches_all = outer_any
                if not self._text.startswith(")", self._position):
                    raise pattern_item_error(text, "bracket")
                self._position += 1
                is_lookahead = text[2:] in ("=", "!")
                return Assertion(text[2:], group) if is_lookahead else group
            case "set":
                return _read_set(text)
            case "escape":
                return _read_escape(text)
        if text in "^$":
            return Assertion(text)
        if text == "." and self._dot_matches_all:
            return Chars("(?s:.)", ALL_CHARS, ALL_CHARS)
        if text == ".":
            chars = ALL_CHARS & ~_LINE_ENDS
            return Chars(_NO_LINE_END, chars, chars)
        return _character(text, ord(text))


def _read_repetition(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return int(text == "+"), 1 if text == "?" else None
    min_count, comma, max_count = text[1:-1].partition(",")
    if max(len(min_count), len(max_count)) > _MAX_DIGITS:
        raise too_large_error()
    return int(min_count), (int(max_count) if max_count else None) if comma else int(
        min_count
    )


def _character(text: str, number: int) -> Chars:
    if number > 127:
        return Chars(text, None)
    return Chars(text, 1 << number, 1 << number)


def _read_escape(text: str) -> Chars:
    letter = text[1]
    if letter.lower() in _CLASSES:
        chars = _CLASSES[letter.lower()]
        if letter.isupper():
            chars = ~chars & (NON_ASCII - 1)
        return Chars(text, chars, chars | NON_ASCII)
    if letter in "xu" and len(text) > 2 and text[2] != "{":
        return _character(text, int(text[2:], 16))
    if letter in _NUMBER_OF_ESCAPE:
        return _character(text, _NUMBER_OF_ESCAPE[letter])
    if letter in "pPu":
        return Chars(text, None)
    if letter.isalnum():
        raise pattern_item_error(text, "escape")
    return _character(text, ord(letter))


def _read_set(text: str) -> Chars:
    negated = text.startswith("[^")
    if not negated and any(
        f"\\{letter}" in text and f"\\{letter.upper()}" in text for letter in "dsw"
    ):
        return Chars(text, ALL_CHARS, ALL_CHARS)
    tokens = _SET_TOKEN.findall(text[1 + negated : -1])
    in_both = in_either = 0
    index = 0
    while index < len(tokens):
        first = _member(tokens[index])
        if first.in_both is None:
            return Chars(text, None)
        index += 1
        if tokens[index : index + 1] == ["-"] and index + 1 < len(tokens):
            last = _member(tokens[index + 1])
            if last.in_both is None:
                return Chars(text, None)
            low, high = first.in_both.bit_length(), last.in_both.bit_length()
            first = _range(text, low - 1, high - 1)
            index += 2
        in_both |= first.in_both or 0
        in_either |= first.in_either
    if negated:
        return Chars(text, ALL_CHARS & ~in_either, ALL_CHARS & ~in_both)
    return Chars(text, in_both, in_either)


def _member(token: str) -> Chars:
    return _read_escape(token) if token[0] == "\\" else _character(token, ord(token))


def _range(text: str, low: int, high: int) -> Chars:
    if low > high:
        raise pattern_item_error(text, "range")
    chars = _bits(range(low, high + 1))
    return Chars(text, chars, chars)


def pattern_item_error(text: str, kind: str) -> GrammarError:
    """The error about a part of a pattern."""
    return GrammarError(
        f"the {kind} {text[:16]!r} in a pattern with look-aheads cannot be enforced"
    )


def has_assertion(item: PatternItem) -> bool:
    """Whether there is an assertion in an item."""
    return any(isinstance(nested, Assertion) for nested in nested_items(item))


def nested_items(item: PatternItem) -> Iterator[PatternItem]:
    """An item, and all that is in it."""
    yield item
    match item:
        case Repeated():
            yield from nested_items(item.item)
        case Group():
            for items in item.alternatives:
                for child in items:
                    yield from nested_items(child)
