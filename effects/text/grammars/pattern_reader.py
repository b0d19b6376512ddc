"""Parses patterns to trees: groups of alternatives, each a sequence of items.

Beyond ASCII, `\\d`, `\\w` and `\\s` differ between `re` and ECMA 262. So a character set
has two bit masks: the characters that both include, and those that either includes.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import define, frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.languages import EVERY, OTHERS, too_large

MAX_DEPTH: Final = 20  # groups within each other
_MOST_DIGITS: Final = 9  # of a number of repetitions
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
_BY_LETTER: Final = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}
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
    """A set of characters: `least` has those of both dialects, `most` those of either.
    If `least` is None, the set is given by `text` only, as it is not of ASCII alone.
    """

    text: str
    least: int | None
    most: int = 0


@frozen
class Assertion:
    """A look-ahead, a beginning or an end."""

    kind: str  # "=", "!", "^" or "$"
    within: "Group | None" = None


@frozen
class Group:
    """Alternatives, each a sequence."""

    alternatives: tuple[tuple["Item", ...], ...]


@frozen
class Repeated:
    """An item, several times."""

    item: "Item"
    least: int
    most: int | None


Item = Chars | Assertion | Group | Repeated


@define
class PatternReader:
    """Reads a pattern."""

    _text: str
    _at: int = 0
    _depth: int = 0
    _any: bool = False  # whether a dot is any character

    def read(self) -> Group:
        """The whole pattern. Raises GrammarError."""
        group = self._group()
        if self._at < len(self._text):
            raise refused(self._text[self._at :], "bracket")
        return group

    def _group(self) -> Group:
        """Alternatives, up to a bracket that closes them."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_large()
        alternatives: list[tuple[Item, ...]] = []
        items: list[Item] = []
        while (match := _TOKEN.match(self._text, self._at)) and match[0] != ")":
            self._at = match.end()
            if match[0] == "|":
                alternatives.append(tuple(items))
                items = []
            elif match.lastgroup == "times":
                if not items or isinstance(items[-1], Assertion | Repeated):
                    raise refused(match[0], "repetition")
                items.append(Repeated(items.pop(), *_times(match["times"])))
            else:
                items.append(self._item(match))
        self._depth -= 1
        return Group((*alternatives, tuple(items)))

    def _item(self, match: re.Match[str]) -> Item:
        text = match[0]
        match match.lastgroup:
            case "open":
                outer_any, self._any = self._any, self._any or text == "(?s:"
                group = self._group()
                self._any = outer_any
                if not self._text.startswith(")", self._at):
                    raise refused(text, "bracket")
                self._at += 1
                is_lookahead = text[2:] in ("=", "!")
                return Assertion(text[2:], group) if is_lookahead else group
            case "set":
                return _read_set(text)
            case "escape":
                return _read_escape(text)
        if text in "^$":
            return Assertion(text)
        if text == "." and self._any:
            return Chars("(?s:.)", EVERY, EVERY)
        if text == ".":
            chars = EVERY & ~_LINE_ENDS
            return Chars(_NO_LINE_END, chars, chars)
        return _character(text, ord(text))


def _times(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return int(text == "+"), 1 if text == "?" else None
    min_count, comma, max_count = text[1:-1].partition(",")
    if max(len(min_count), len(max_count)) > _MOST_DIGITS:
        raise too_large()
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
            chars = ~chars & (OTHERS - 1)
        return Chars(text, chars, chars | OTHERS)
    if letter in "xu" and len(text) > 2 and text[2] != "{":
        return _character(text, int(text[2:], 16))
    if letter in _BY_LETTER:
        return _character(text, _BY_LETTER[letter])
    if letter in "pPu":
        return Chars(text, None)
    if letter.isalnum():
        raise refused(text, "escape")
    return _character(text, ord(letter))


def _read_set(text: str) -> Chars:
    negated = text.startswith("[^")
    if not negated and any(
        f"\\{letter}" in text and f"\\{letter.upper()}" in text for letter in "dsw"
    ):
        return Chars(text, EVERY, EVERY)
    tokens = _SET_TOKEN.findall(text[1 + negated : -1])
    in_both = in_either = 0
    index = 0
    while index < len(tokens):
        first = _member(tokens[index])
        if first.least is None:
            return Chars(text, None)
        index += 1
        if tokens[index : index + 1] == ["-"] and index + 1 < len(tokens):
            last = _member(tokens[index + 1])
            if last.least is None:
                return Chars(text, None)
            low, high = first.least.bit_length(), last.least.bit_length()
            first = _range(text, low - 1, high - 1)
            index += 2
        in_both |= first.least or 0
        in_either |= first.most
    if negated:
        return Chars(text, EVERY & ~in_either, EVERY & ~in_both)
    return Chars(text, in_both, in_either)


def _member(token: str) -> Chars:
    return _read_escape(token) if token[0] == "\\" else _character(token, ord(token))


def _range(text: str, low: int, high: int) -> Chars:
    if low > high:
        raise refused(text, "range")
    chars = _bits(range(low, high + 1))
    return Chars(text, chars, chars)


def refused(text: str, kind: str) -> GrammarError:
    """The error about a part of a pattern."""
    return GrammarError(
        f"the {kind} {text[:16]!r} in a pattern with look-aheads cannot be enforced"
    )


def asserts(item: Item) -> bool:
    """Whether there is an assertion in an item."""
    return any(isinstance(nested, Assertion) for nested in within(item))


def within(item: Item) -> Iterator[Item]:
    """An item, and all that is in it."""
    yield item
    match item:
        case Repeated():
            yield from within(item.item)
        case Group():
            for items in item.alternatives:
                for child in items:
                    yield from within(child)
