"""Stop strings: where a text that comes in pieces has to end."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that ends first in a text that comes in pieces.

    Of several that end at the same character, the longest. The result does not depend on
    how the text is cut into pieces. Text that may turn out to begin a stop string is held
    back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would end every
        text at once.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty; remove it from the list")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def push(self, piece: str, *, final: bool = False) -> tuple[str, str | None]:
        """Take text; return (text that is certain, the stop string found or None).

        After a find the rest is dropped; with `final` nothing is held back.
        """
        text = self._held + piece
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        keep = len(text) if final else 0
        while keep < len(text) and not any(
            s.startswith(text[keep:]) for s in self._stops
        ):
            keep += 1
        self._held = text[keep:]
        return text[:keep], None
