"""Which known word an unknown one was meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

# How alike two words are, from 0 to 1, if one is a typo of the other. difflib's default,
# 0.6, finds "messages" near "images", and "stream" near "system".
ALIKE: Final = 0.75


def nearest(word: str, known: Iterable[str], alike: float = ALIKE) -> str | None:
    """The known word that a word is a typo of, if one is at least so much `alike`."""
    near = get_close_matches(word, list(known), 1, alike)
    return near[0] if near else None
