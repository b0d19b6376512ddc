"""The end of a JSON value, found while it comes; the value is not built.

A stack machine, as strict as `json.loads`: what it accepts as complete parses, and what
it has accepted so far begins a value at any time. With one exception: models write line
breaks and tabs into strings unescaped, which JSON forbids, and these are passed on as
escapes.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from minfer.effects.text.tools.source import SPACE

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')  # within a string
_MAX_NUMBER_CHARS: Final = 512  # characters of a number: `json.loads` has a bound, too
_WORDS: Final = ("true", "false", "null")
_CLOSERS: Final = {"{": "}", "[": "]"}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
Step = Callable[[str, int], int]


def _to_state(characters: str, next_state: str) -> dict[str, str]:
    return dict.fromkeys(characters, next_state)


_EXPONENT: Final = _to_state("eE", "e")
# Words and numbers, by their text so far: what may come next, and their text after it.
# Numbers are written with one digit for any number of them.
_TRANSITIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {"-": "-", "0": "0", **_to_state("123456789", "1"), "t": "t", "f": "f", "n": "n"},
    "-": {"0": "0", **_to_state("123456789", "1")},
    "0": {".": "1.", **_EXPONENT},
    "1": {**_to_state("0123456789", "1"), ".": "1.", **_EXPONENT},
    "1.": _to_state("0123456789", "1.1"),
    "1.1": {**_to_state("0123456789", "1.1"), **_EXPONENT},
    "e": {**_to_state("0123456789", "e1"), **_to_state("+-", "e+")},
    "e+": _to_state("0123456789", "e1"),
    "e1": _to_state("0123456789", "e1"),
    **{
        word[:end]: {word[end]: word[: end + 1]}
        for word in _WORDS
        for end in range(1, len(word))
    },
    **{word: {} for word in _WORDS},
}
_COMPLETE_WORDS: Final = frozenset({"0", "1", "1.1", "e1", *_WORDS})


class JsonScanner:
    """Follows one JSON value, from its first character to its last."""

    def __init__(self) -> None:
        self.done = False  # the value is complete
        self.broken = False  # the text cannot be JSON
        self.accepted: list[str] = []  # accepted text
        self._open: list[str] = []  # braces and brackets
        self._step: Step = self._value
        self._word = ""  # its text so far, as in `_TRANSITIONS`
        self._length = 0  # of that text
        self._digits = 0  # of an escape, still missing
        self._key = False  # the string is a key

    def feed(self, text: str, index: int = 0) -> int:
        """Accept the value's text, from `index` on; returns where that ends."""
        while index < len(text) and not (self.done or self.broken):
            index = self._step(text, index)
        return index

    def end(self) -> None:
        """Note the end of the text: a number may end so, and nothing else."""
        if self._step == self._in_word and self._word in _COMPLETE_WORDS:
            self._step_after_value()
        self.broken = not self.done

    def take_accepted(self) -> str:
        """The text accepted since the last time."""
        text = "".join(self.accepted)
        self.accepted = []
        return text

    def _accept(self, text: str, index: int, next_step: Step) -> int:
        """Accept one character, and continue with a step."""
        self.accepted.append(text[index])
        self._step = next_step
        return index + 1

    def _reject(self, index: int) -> int:
        self.broken = True
        return index

    def _step_after_value(self) -> Step:
        """The step after a value."""
        self.done = not self._open
        return self._after

    def _value(self, text: str, index: int) -> int:
        """The beginning of a value."""
        char = text[index]
        if char in SPACE:
            return self._accept(text, index, self._step)
        if char == '"':
            self._key = False
            return self._accept(text, index, self._in_string)
        if char in _CLOSERS:
            self._open.append(char)
            return self._accept(
                text, index, self._key_or_end if char == "{" else self._first
            )
        self._word, self._length = "", 0
        return self._in_word(text, index)

    def _first(self, text: str, index: int) -> int:
        """The first value of a list, or its end."""
        return (
            self._after(text, index) if text[index] == "]" else self._value(text, index)
        )

    def _key_or_end(self, text: str, index: int) -> int:
        return (
            self._after(text, index) if text[index] == "}" else self._any_key(text, index)
        )

    def _any_key(self, text: str, index: int) -> int:
        if text[index] in SPACE:
            return self._accept(text, index, self._step)
        if text[index] != '"':
            return self._reject(index)
        self._key = True
        return self._accept(text, index, self._in_string)

    def _colon(self, text: str, index: int) -> int:
        if text[index] in SPACE:
            return self._accept(text, index, self._step)
        return (
            self._accept(text, index, self._value)
            if text[index] == ":"
            else self._reject(index)
        )

    def _after(self, text: str, index: int) -> int:
        """After a value: a comma, or the end of its container."""
        char = text[index]
        if char in SPACE:
            return self._accept(text, index, self._after)
        if char == ",":
            in_object = self._open[-1] == "{"
            return self._accept(text, index, self._any_key if in_object else self._value)
        if char != _CLOSERS[self._open[-1]]:
            return self._reject(index)
        self._open.pop()
        return self._accept(text, index, self._step_after_value())

    def _in_string(self, text: str, index: int) -> int:
        if (match := _PLAIN.match(text, index)) is not None:
            self.accepted.append(match[0])
            return match.end()
        if text[index] == "\\":
            return self._accept(text, index, self._escape)
        if text[index] != '"':
            self.accepted.append(json.dumps(text[index])[1:-1])
            return index + 1
        return self._accept(
            text, index, self._colon if self._key else self._step_after_value()
        )

    def _escape(self, text: str, index: int) -> int:
        if text[index] not in '"\\/bfnrtu':
            return self._reject(index)
        self._digits = 4
        return self._accept(
            text, index, self._hex if text[index] == "u" else self._in_string
        )

    def _hex(self, text: str, index: int) -> int:
        if text[index] not in _HEX:
            return self._reject(index)
        self._digits -= 1
        return self._accept(text, index, self._hex if self._digits else self._in_string)

    def _in_word(self, text: str, index: int) -> int:
        """A number, true, false or null: until another character comes."""
        if (word := _TRANSITIONS[self._word].get(text[index])) is not None:
            self._word = word
            self._length += 1
            if self._length > _MAX_NUMBER_CHARS:
                return self._reject(index)
            return self._accept(text, index, self._in_word)
        if self._word not in _COMPLETE_WORDS:
            return self._reject(index)
        self._step = self._step_after_value()
        return index
