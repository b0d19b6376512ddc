"""The source of a reader: a text that is read while it comes.

The functions here are the building blocks of readers: generators that yield while they
lack text, and return their result. `yield from` runs them.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from attrs import frozen

Read = TypeVar("Read")
Reading = Generator[None, None, Read]
SPACE: Final = " \t\r\n"  # the white space of JSON and of formats


class StreamedText:
    """Text of which a part was taken, and more may come."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0  # the text before it was taken
        self.ended = False
        self._kept: list[str] | None = None
        self._settled: list[str] = []

    def push(self, text: str, *, final: bool = False) -> None:
        """Add text; with `final`, there is no more."""
        self.text = self.text[self.position :] + text
        self.position = 0
        self.ended = final

    def take(self, count: int) -> str:
        """Take the next characters, and return them."""
        taken = self.text[self.position : self.position + count]
        self.position += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Put text back in front, which was taken."""
        self.text = text + self.text[self.position :]
        self.position = 0

    def keep(self, prefix: str = "") -> None:
        """Keep a copy of the text taken from here on, after `prefix`."""
        self._kept = [prefix]
        self._settled = []

    def settle(self) -> None:
        """Note that the kept text is a call's, as far as it was read."""
        self._settled += self._kept or ()
        self._kept = []

    def take_settled(self) -> str:
        """The text up to the last `settle` since `keep`; the copy is dropped."""
        text = "".join(self._settled)
        self._settled = []
        return text

    def take_kept(self) -> str:
        """The text taken since `keep` or `settle`; the copy is dropped."""
        text = "".join(self._kept or ())
        self._kept = None
        return text


def peek_any(source: StreamedText, words: Sequence[str]) -> Reading[str]:
    """The first of these words that comes next, or an empty string. Nothing is taken.

    A word that begins another comes after it.
    """
    while True:
        upcoming = source.text[source.position : source.position + max(map(len, words))]
        for word in words:
            if upcoming.startswith(word):
                return word
            if word.startswith(upcoming) and not source.ended:
                break
        else:
            return ""
        yield


def peek_char(source: StreamedText) -> Reading[str]:
    """The next character, or an empty string at the end. It is not taken."""
    while source.position == len(source.text):
        if source.ended:
            return ""
        yield
    return source.text[source.position]


def take_matching(source: StreamedText, characters: re.Pattern[str]) -> Reading[str]:
    """Take characters as long as they match a pattern, which matches any number."""
    pieces = []
    while (yield from peek_char(source)):
        match = characters.match(source.text, source.position)
        if match is None or not match[0]:
            break
        pieces.append(source.take(len(match[0])))
    return "".join(pieces)


_SPACES: Final = re.compile(f"[{SPACE}]*")


def take_space(source: StreamedText) -> Reading[str]:
    """Take white space."""
    return (yield from take_matching(source, _SPACES))


def take_repeats(source: StreamedText, marker: str) -> Reading[str]:
    """Take white space, and a marker that was taken if models repeat it."""
    taken = yield from take_space(source)
    while (yield from peek_any(source, [marker])):
        taken += source.take(len(marker)) + (yield from take_space(source))
    return taken


def take_until(
    source: StreamedText, markers: Sequence[str], emit: Callable[[str], None]
) -> Reading[str]:
    """Take text and emit it, up to the first of these markers; take that too. Of two that
    begin alike, the longer one counts.

    Returns the marker, or an empty string at the end.
    """
    search = _search(tuple(markers))
    while True:
        match = search.pattern.search(source.text, source.position)
        num_held = 0 if source.ended else search.num_begun(source.text, source.position)
        before = len(source.text) - num_held  # a marker may begin there, or a longer one
        if match is not None and (not num_held or match.start() < before):
            emit(source.take(match.start() - source.position))
            return source.take(len(match[0]))
        if before > source.position:
            emit(source.take(before - source.position))
        if source.ended:
            return ""
        yield


@frozen
class _MarkerSearch:
    """The search for the first of several markers."""

    pattern: re.Pattern[str]
    beginnings: frozenset[str]  # of markers, which may be at the end of a text
    longest: int  # of those

    def num_begun(self, text: str, start: int) -> int:
        """The number of last characters, from `start` on, that may begin a marker."""
        for count in range(min(self.longest, len(text) - start), 0, -1):
            if text[-count:] in self.beginnings:
                return count
        return 0


@lru_cache(maxsize=512)
def _search(markers: tuple[str, ...]) -> _MarkerSearch:
    ordered = sorted(markers, key=len, reverse=True)
    beginnings = {marker[:end] for marker in markers for end in range(1, len(marker))}
    return _MarkerSearch(
        re.compile("|".join(map(re.escape, ordered))),
        frozenset(beginnings),
        max(map(len, beginnings), default=0),
    )
