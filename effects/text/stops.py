"""Stop strings: where a text that comes in pieces ends.

A text is searched for two things: a stop string that ends at a character, which one call
of `str.endswith` finds for all of them; and the longest end of the text that may begin a
stop string, which is held. Stop strings are sorted, so that those with a common beginning
are neighbours: one bisection finds whether any of them begins with an end.

When text is added, its longest end cannot begin any earlier than before. So a place where
no stop string begins is not looked at again, and over a whole text there are at most two
bisections for each character.
"""

from bisect import bisect
from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that ends first in a text that comes in pieces.

    Of several that end at the same character, the longest. The result does not depend on
    how the text is cut into pieces. Text that may begin a stop string is held,
    unless stop strings stay in the text (`keep_stops`).
    """

    def __init__(self, stops: Sequence[str], *, keep_stops: bool = False) -> None:
        """Raises ValueError for an empty stop string, which would end every
        text at once.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty; remove it from the list")
        self._keeps_stops = keep_stops
        self._stops = tuple(sorted(set(stops)))
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._lasts = frozenset(stop[-1] for stop in self._stops)
        self._tail = ""  # the longest end of the text that may begin a stop string

    def push_without_stop(self, piece: str) -> str:
        """Add text in which a stop string that ends does not count; return the text that
        is certain, as one may begin in it.
        """
        num_emitted, text = self._num_emitted(), self._tail + piece
        self._tail = self._partial_stop(text)
        return text[num_emitted : len(text) - self._num_held()]

    def push(self, piece: str, *, final: bool = False) -> tuple[str, str | None]:
        """Add text; return (text that is certain, the stop string found or None).

        After a find, the rest is dropped; with `final` no text is held.
        """
        if not self._tail and self._firsts.isdisjoint(piece):
            return piece, None
        num_emitted, text = self._num_emitted(), self._tail + piece
        end, stop = self._find_stop(text, len(self._tail))
        if stop is not None:
            self._tail = ""
            return text[num_emitted : end if self._keeps_stops else end - len(stop)], stop
        self._tail = "" if final else self._partial_stop(text)
        return text[num_emitted : len(text) - self._num_held()], None

    def _num_held(self) -> int:
        """The number of held characters."""
        return 0 if self._keeps_stops else len(self._tail)

    def _num_emitted(self) -> int:
        """The number of characters of the longest end that were emitted."""
        return len(self._tail) if self._keeps_stops else 0

    def _find_stop(self, text: str, begin: int) -> tuple[int, str | None]:
        """Where the first stop string ends after `begin`, and which one."""
        for end, char in enumerate(text[begin:], begin + 1):
            if char in self._lasts and text.endswith(self._stops, 0, end):
                matches = [stop for stop in self._stops if text.endswith(stop, 0, end)]
                return end, max(matches, key=len)
        return len(text), None

    def _partial_stop(self, text: str) -> str:
        """The longest end of a text that is the beginning of a longer stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                suffix = text[start:]
                index = bisect(self._stops, suffix)
                if index < len(self._stops) and self._stops[index].startswith(suffix):
                    return suffix
        return ""
