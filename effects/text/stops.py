"""Stop strings: where a text that comes in pieces has to end.

What the text so far may turn out to begin is a state of an automaton of all stop strings
(`minfer.effects.text.automaton`): a letter costs the same for one or for many. Requests
with equal stop strings share one, as long as one of them lives.
"""

from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

from minfer.effects.text.automaton import ROOT, Automaton

_SHARED: Final = WeakValueDictionary[frozenset[str], Automaton]()


class StopMatcher:
    """Finds the stop string that ends first in a text that comes in pieces.

    Of several that end at the same character, the longest. The result does not depend on
    how the text is cut into pieces. Text that may turn out to begin a stop string is held
    back, unless stop strings are `kept` in the text.
    """

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        """Raises ValueError for an empty stop string, which would end every
        text at once.
        """
        self._kept = kept
        if not all(stops):
            raise ValueError("a stop string must not be empty; remove it from the list")
        self._stops = _shared(frozenset(stops))
        self._state = ROOT
        self._held = ""

    def pass_by(self, piece: str) -> str:
        """Take text in which no stop string counts that ends there; return text that is
        certain: one may begin in it.
        """
        if self._state == ROOT and self._stops.passes(piece):
            return piece
        read = 0
        while read < len(piece):
            place = self._stops.read(self._state, piece[read:])
            self._state = self._stops.beyond(place.state)
            read += place.read
        text = self._held + piece
        keep = len(text)
        if not self._kept:
            keep -= self._stops.length(self._state)
        self._held = text[keep:]
        return text[:keep]

    def push(self, piece: str, *, final: bool = False) -> tuple[str, str | None]:
        """Take text; return (text that is certain, the stop string found or None).

        After a find, what is behind it is dropped; with `final` nothing is held back.
        """
        if self._state == ROOT and self._stops.passes(piece):
            return piece, None
        place = self._stops.read(self._state, piece)
        text = self._held + piece[: place.read]
        found = self._stops.ends.get(place.state)
        over = final or found is not None
        self._state = ROOT if over else place.state
        held = 0 if found is None else len(found)
        held = held if over else self._stops.length(place.state)
        keep = len(text) - (0 if self._kept else held)
        self._held = "" if over else text[keep:]
        return text[:keep], found


def _shared(stops: frozenset[str]) -> Automaton:
    made = _SHARED.get(stops)
    if made is None:
        made = _SHARED[stops] = Automaton(stops)
    return made
