"""Sets of characters within patterns, as Rust writes them."""

from typing import Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError

ASCII: Final = frozenset(range(128))
CONTROLS: Final = frozenset(range(32))
_ESCAPED: Final = frozenset(map(ord, '"\\'))
_DROPPED: Final = r"\x{1}"
SURROGATES: Final = range(0xD800, 0xE000)
SURROGATE_NEIGHBOURS: Final = (SURROGATES.start - 1, SURROGATES.stop)
ALL_CHARACTERS: Final = range(0x110000)
# What JSON has no escape for but one by number.
ONLY_NUMBERED: Final = (CONTROLS | {127}) - set(map(ord, "\n\r\t\b\f"))


@frozen
class CharacterSet:
    """A set of characters as Rust writes it, and which of them are ASCII."""

    text: str
    ascii: frozenset[int]
    known: bool = True  # whether it holds no other ASCII characters
    beyond: bool = False  # whether it may hold characters beyond ASCII
    ranges: tuple[range, ...] = ()  # of characters that it holds, as far as known
    empty: bool = False  # it holds no character

    @property
    def may_gain_escapes(self) -> bool:
        """Whether it might get escapes of characters that it lacks."""
        return not self.known or not self.ascii >= _ESCAPED

    @property
    def controls(self) -> frozenset[int]:
        """The control characters that it may hold."""
        return self.ascii & CONTROLS if self.known else CONTROLS

    def without_dropped(self) -> str:
        """The set without U+0001, if that has to go. Raises GrammarError if nothing is
        left then.
        """
        if not self.may_gain_escapes or 1 not in self.controls:
            return self.text
        if self.text == f"[{_DROPPED}]":
            reason = (
                "a pattern cannot have U+0001 and sets of all other control characters"
            )
            raise GrammarError(f"{reason}; leave U+0001 out")
        return f"[{self.text}--{_DROPPED}]"

    def check_spellable(self, *, dropping: bool) -> None:
        """Raise GrammarError if no escape but one by number stands for what it holds."""
        remaining = self.ascii - {1} if dropping else self.ascii
        if self.known and not self.beyond and remaining and remaining <= ONLY_NUMBERED:
            raise unnamed_error(min(remaining))


# What `.` matches for `re`, and for ECMA 262, too.
NO_LINE_FEED: Final = CharacterSet(r"[^\x{A}]", ASCII - {10}, beyond=True)
NO_LINE_END: Final = CharacterSet(
    r"[^\x{A}\x{D}\x{2028}\x{2029}]", ASCII - {10, 13}, beyond=True
)


def unnamed_error(number: int) -> GrammarError:
    """The error about a control character in a schema whose texts have no escapes by
    number.
    """
    reason = "cannot be written beside patternProperties with additionalProperties"
    return GrammarError(f"U+{number:04X} {reason}; leave one of them out")


def holds_all(ranges: list[range]) -> bool:
    """Whether these ranges hold all characters."""
    end = 0
    for span in sorted(ranges, key=lambda span: span.start):
        end = SURROGATES.stop if end in SURROGATES else end
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end >= ALL_CHARACTERS.stop


def range_text(low: int, high: int) -> str:
    """Characters from `low` to `high`, as members of a set: without surrogates."""
    low = SURROGATES.stop if low in SURROGATES else low
    high = SURROGATES.start - 1 if high in SURROGATES else high
    if low >= high:
        return character(low) if low == high else ""
    return f"{character(low)}-{character(high)}"


def character(number: int) -> str:
    """A character as Rust writes it, within sets and outside."""
    text = chr(number)
    return text if text.isascii() and text.isalnum() else f"\\x{{{number:X}}}"
