"""Where a JSON value ends, while it comes; it is not built.

A machine with a stack: strict as `json.loads` is, so what it lets through parses. But for
one thing: models write line breaks and tabs into strings as they are, which JSON forbids,
and these are passed on as escapes.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from minfer.effects.text.tools.source import SPACE

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')  # within a string
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LONGEST: Final = 512  # characters of a number: it is kept until it ends
_WORDS: Final = frozenset({"true", "false", "null"})
_CLOSES: Final = {"{": "}", "[": "]"}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
Step = Callable[[str, int], int]


class JsonScanner:
    """Follows one JSON value, from its first character to its last."""

    def __init__(self) -> None:
        self.done = False  # the value is whole
        self.broken = False  # what came next cannot be JSON
        self.passed: list[str] = []  # what was taken
        self._open: list[str] = []  # braces and brackets
        self._step: Step = self._value
        self._word = ""
        self._digits = 0  # of an escape, still to come
        self._key = False  # the string is one

    def feed(self, text: str, at: int = 0) -> int:
        """Take what belongs to the value, from `at` on; returns where that ends."""
        while at < len(text) and not (self.done or self.broken):
            at = self._step(text, at)
        return at

    def end(self) -> None:
        """There is no more text: a number may end so, and nothing else."""
        if self._step == self._in_word and not self._open:
            self._end_word()
        self.broken = not self.done

    def taken(self) -> str:
        """What was taken since the last time."""
        text = "".join(self.passed)
        self.passed = []
        return text

    def _pass(self, text: str, at: int, then: Step) -> int:
        """Take one character, and go on with a step."""
        self.passed.append(text[at])
        self._step = then
        return at + 1

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    def _closed(self) -> Step:
        """A value is over: what comes next?"""
        self.done = not self._open
        return self._after

    def _value(self, text: str, at: int) -> int:
        """A value begins."""
        char = text[at]
        if char in SPACE:
            return self._pass(text, at, self._step)
        if char == '"':
            self._key = False
            return self._pass(text, at, self._in_string)
        if char in _CLOSES:
            self._open.append(char)
            return self._pass(text, at, self._key_or_end if char == "{" else self._first)
        if _WORD.match(char):
            self._step = self._in_word
            return at
        return self._break(at)

    def _first(self, text: str, at: int) -> int:
        """The first value of a list, or its end."""
        return self._after(text, at) if text[at] == "]" else self._value(text, at)

    def _key_or_end(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "}" else self._any_key(text, at)

    def _any_key(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return self._pass(text, at, self._step)
        if text[at] != '"':
            return self._break(at)
        self._key = True
        return self._pass(text, at, self._in_string)

    def _colon(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return self._pass(text, at, self._step)
        return self._pass(text, at, self._value) if text[at] == ":" else self._break(at)

    def _after(self, text: str, at: int) -> int:
        """Behind a value: a comma, or the end of what it is in."""
        char = text[at]
        if char in SPACE:
            return self._pass(text, at, self._after)
        if char == ",":
            within = self._open[-1] == "{"
            return self._pass(text, at, self._any_key if within else self._value)
        if char != _CLOSES[self._open[-1]]:
            return self._break(at)
        self._open.pop()
        return self._pass(text, at, self._closed())

    def _in_string(self, text: str, at: int) -> int:
        if (match := _PLAIN.match(text, at)) is not None:
            self.passed.append(match[0])
            return match.end()
        if text[at] == "\\":
            return self._pass(text, at, self._escape)
        if text[at] != '"':
            self.passed.append(json.dumps(text[at])[1:-1])
            return at + 1
        return self._pass(text, at, self._colon if self._key else self._closed())

    def _escape(self, text: str, at: int) -> int:
        if text[at] not in '"\\/bfnrtu':
            return self._break(at)
        self._digits = 4
        return self._pass(text, at, self._hex if text[at] == "u" else self._in_string)

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._break(at)
        self._digits -= 1
        return self._pass(text, at, self._hex if self._digits else self._in_string)

    def _in_word(self, text: str, at: int) -> int:
        """A number, true, false or null: until something else comes."""
        if (match := _WORD.match(text, at)) is None:
            self._end_word()
            return at
        self._word += match[0][: _LONGEST + 1]
        if len(self._word) > _LONGEST:
            return self._break(at)
        self.passed.append(match[0])
        return match.end()

    def _end_word(self) -> None:
        good = self._word in _WORDS or _NUMBER.fullmatch(self._word) is not None
        self._word = ""
        if good:
            self._step = self._closed()
        else:
            self.broken = True
