"""Finds the known word that a mistyped word was meant to be."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from minfer.values.checks import ConfigError

# How alike two words are, from 0 to 1, if one is a typo of the other. difflib's default,
# 0.6, finds "messages" near "images", and "stream" near "system".
DEFAULT_MIN_SIMILARITY: Final = 0.75


def nearest(
    word: str, candidates: Iterable[str], min_similarity: float = DEFAULT_MIN_SIMILARITY
) -> str | None:
    """Returns the candidate that a word is a typo of, if one is at least
    `min_similarity` alike.
    """
    matches = get_close_matches(word, list(candidates), 1, min_similarity)
    return matches[0] if matches else None


def check_keys(setting: str, keys: Iterable[object], known: Sequence[str]) -> None:
    """Raise ConfigError for a key of the mapping `setting` that is not a `known` one."""
    for key in keys:
        if key not in known:
            suggestion = nearest(str(key), known)
            hint = (
                f"did you mean {suggestion}?"
                if suggestion
                else f"there are {', '.join(known)}"
            )
            raise ConfigError(f"{setting}: {key!r:.80} is no key of it; {hint}")
