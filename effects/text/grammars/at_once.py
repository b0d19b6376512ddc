"""Masks of many rows in one call, on all processors.

Whose fault it is if that takes long cannot be seen from outside. So what comes after a
call that took longer than one mask may take is made, and timed, row by row: who is too
slow then ends (`walking.py`), and the others go on as before.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import numpy as np

from minfer.effects.text.grammars.protocol import GrammarError, Move
from minfer.effects.text.grammars.walking import MOST_SECONDS, LlguidanceMatcher

BITS = 32  # of a word of the library's masks

Made = bytes | GrammarError


class AtOnce:
    """Moves matchers, and makes their masks."""

    def __init__(self, vocab_size: int) -> None:
        """Starts as many threads as there are processors, but for a few."""
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self._words = -(-vocab_size // BITS)
        self._suspicious = False  # whether the last call took long

    def masks(self, moves: Sequence[Move]) -> list[Made]:
        """Their masks, in order, or why there is none."""
        walks = [_own(move) for move in moves]
        errors = self._moved(walks, moves)
        going = [walk for walk, error in zip(walks, errors, strict=True) if not error]
        begun = time.monotonic()
        if self._suspicious:
            made = [_or_why(walk.mask) for walk in going]
            self._suspicious = False
        else:
            made = self._made(going)
            self._suspicious = time.monotonic() - begun > MOST_SECONDS
        each = iter(made)
        return [error or next(each) for error in errors]

    def _moved(
        self, walks: Sequence[LlguidanceMatcher], moves: Sequence[Move]
    ) -> list[GrammarError | None]:
        """Move them; for each that cannot go there, why."""
        by_one = [not one.back and len(one.tokens) == 1 for one in moves]
        simple = [*compress(range(len(moves)), by_one)]
        steps = [(walks[i].inner, moves[i].tokens[0]) for i in simple]
        took = self._executor.consume_token_par(steps) if steps else []
        fine = set(compress(simple, took))
        return [None if i in fine else _moved_alone(moves[i]) for i in range(len(moves))]

    def _made(self, walks: Sequence[LlguidanceMatcher]) -> list[Made]:
        if not walks:
            return []
        lines = np.empty((len(walks), self._words), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(walk.inner, line) for line, walk in enumerate(walks)],
            lines.ctypes.data,
            lines.strides[0],
            len(walks),
        )
        pairs = zip(walks, lines, strict=True)
        return [_or_why(partial(walk.checked, line.tobytes())) for walk, line in pairs]


def _own(move: Move) -> LlguidanceMatcher:
    if not isinstance(move.matcher, LlguidanceMatcher):
        raise TypeError(f"{move.matcher!r} was made by somebody else")
    return move.matcher


def _moved_alone(move: Move) -> GrammarError | None:
    try:
        move.matcher.rollback(move.back)
        move.matcher.advance(move.tokens)
    except GrammarError as error:
        return error
    return None


def _or_why(make: Callable[[], bytes]) -> Made:
    try:
        return make()
    except GrammarError as error:
        return error
