"""Lines of masks: a bit for each token id, the lowest first; and bulk changes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Lines = NDArray[np.int32]  # [lines, words]
WORD_BITS: Final = 32
MAX_BANS: Final = 256  # sets of tokens, which clients name, that are kept
NUM_FIRST_WORDS: Final = 32  # words that are looked at before all are


def fill(line: NDArray[np.int32], bits: bytes) -> None:
    """Write a mask to a line; tokens beyond it are not allowed."""
    line_bytes = line.view(np.uint8)
    mask_bytes = np.frombuffer(bits, np.uint8)[: len(line_bytes)]
    line_bytes[: len(mask_bytes)] = mask_bytes
    line_bytes[len(mask_bytes) :] = 0


def bits_of(line: NDArray[np.int32]) -> bytes:
    """The mask of a line."""
    return line.tobytes()


@frozen(eq=False)
class BannedTokens:
    """Tokens that lines may not allow, as bits of words."""

    words: NDArray[np.intp]
    bits: NDArray[np.uint32]

    @classmethod
    def of(cls, tokens: Iterable[int], words: int) -> "BannedTokens":
        """The tokens that are in lines of this many `words`."""
        bits_by_word: dict[int, int] = {}
        for token in tokens:
            if token < WORD_BITS * words:
                bits_by_word[token // WORD_BITS] = (
                    bits_by_word.get(token // WORD_BITS, 0) | 1 << token % WORD_BITS
                )
        return cls(
            np.array(list(bits_by_word), np.intp),
            np.array(list(bits_by_word.values()), np.uint32),
        )

    def clear(self, lines: Lines, line_numbers: Sequence[int]) -> list[int]:
        """Have some lines not allow these tokens; returns those that then allow
        nothing.
        """
        indices = np.array(line_numbers, np.intp)
        all_words = lines.view(np.uint32)
        selected = all_words[indices[:, None], self.words]
        hits = (selected & self.bits).any(axis=1)
        if not hits.any():  # the usual case
            return []
        indices, selected = indices[hits], selected[hits]
        all_words[indices[:, None], self.words] = selected & ~self.bits
        # A line that allows much allows some of the first tokens, which are characters.
        candidates = indices[~all_words[indices, :NUM_FIRST_WORDS].any(axis=1)].tolist()
        return [line for line in candidates if not all_words[line].max()]


class TokenBans:
    """Has lines not allow tokens; caches the positions of up to MAX_BANS sets."""

    def __init__(self) -> None:
        self._bans: dict[tuple[int, frozenset[int]], BannedTokens] = {}

    def clear(
        self, lines: Lines, banned: Mapping[frozenset[int], Sequence[int]]
    ) -> frozenset[int]:
        """Have the lines that are `banned` from some tokens not allow these; returns
        those that then allow nothing.
        """
        empty = list[int]()
        for tokens, line_numbers in banned.items():
            if tokens:
                key = lines.shape[1], tokens
                if key not in self._bans:
                    if len(self._bans) >= MAX_BANS:
                        self._bans.clear()
                    self._bans[key] = BannedTokens.of(tokens, lines.shape[1])
                empty += self._bans[key].clear(lines, line_numbers)
        return frozenset(empty)
