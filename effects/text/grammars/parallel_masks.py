"""Masks of many rows in one call, on all processors.

The library writes each mask to its place, and lets other threads run: the work here for
each row is to put it into a list. Nearly all matchers go forward by one token, which
takes a microsecond or two: many do so in one call, too, and few one after the other,
which is over before threads would have woken up.

Masks that take longer than MASK_WAIT_SECONDS are detected meanwhile (slow_masks.py).
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from minfer.effects.text.grammars.grammar_library import (
    MASK_WAIT_SECONDS,
    GrammarError,
    MatcherUpdate,
)
from minfer.effects.text.grammars.llguidance_matcher import (
    LlguidanceMatcher,
    raise_if_failed,
)
from minfer.effects.text.grammars.mask_lines import WORD_BITS, Lines
from minfer.effects.text.grammars.slow_masks import MASK_THREADS, MaskWatch

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SERIAL_ROWS: Final = 48  # rows that take their tokens one after the other


class ParallelMasks:
    """Moves matchers, and has their masks written."""

    def __init__(self, vocab_size: int) -> None:
        """Starts as many threads as there are processors, but for a few."""
        from llguidance import LLExecutor

        self._executor = LLExecutor(num_threads=MASK_THREADS)
        self._watch = MaskWatch()
        self.words = -(-vocab_size // WORD_BITS)  # of a line

    def masks(
        self, updates: Sequence[MatcherUpdate], lines: Lines
    ) -> dict[int, GrammarError]:
        """As `Compiler` says."""
        if not updates:
            return {}
        matchers = _library_matchers(updates)
        errors = self._update_matchers(updates, matchers)
        pending = [
            (matcher, update.line)
            for matcher, update in zip(matchers, updates, strict=True)
        ]
        if errors:
            pending = [pair for pair in pending if pair[1] not in errors]
        if not pending:
            return errors
        with self._watch.watch(lines, [line for _, line in pending]) as call:
            errors |= self._write_masks(pending, lines)
        if call.slow:
            for update in updates:
                update.slow |= update.line in call.slow
        return errors

    def _update_matchers(
        self, updates: Sequence[MatcherUpdate], matchers: "list[LLMatcher]"
    ) -> dict[int, GrammarError]:
        """Move them; for each that cannot go there, why."""
        errors: dict[int, GrammarError] = {}
        simple = [
            (matcher, update)
            for matcher, update in zip(matchers, updates, strict=True)
            if not update.num_rollback and len(update.tokens) == 1
        ]
        if len(simple) > MAX_SERIAL_ROWS:
            pairs = [(matcher, update.tokens[0]) for matcher, update in simple]
            allowed = self._executor.consume_token_par(pairs)
        else:
            allowed = [_consume(matcher, update) for matcher, update in simple]
        if len(simple) == len(updates) and all(allowed):
            return errors
        results = iter(allowed)
        for update in updates:
            if not update.num_rollback and len(update.tokens) == 1 and next(results):
                continue
            try:
                update.matcher.rollback(update.num_rollback)
                update.matcher.advance(update.tokens)
            except GrammarError as error:
                errors[update.line] = error
        return errors

    def _write_masks(
        self, pending: "list[tuple[LLMatcher, int]]", lines: Lines
    ) -> dict[int, GrammarError]:
        if not pending:
            return {}
        if lines.shape[1] != self.words or not lines.flags["C_CONTIGUOUS"]:
            raise ValueError(f"lines of {lines.shape[1]} words, not {self.words}")
        self._executor.unsafe_compute_mask_ptr(
            pending, lines.ctypes.data, lines.strides[0], len(lines)
        )
        return {
            line: _error_of(matcher) for matcher, line in pending if matcher.is_error()
        }


def _library_matchers(updates: Sequence[MatcherUpdate]) -> "list[LLMatcher]":
    """The library's own matchers. Types are looked at only where that fails: this is done
    for each row of each step.
    """
    matchers: list[Any] = [update.matcher for update in updates]
    try:
        return [matcher.inner for matcher in matchers]
    except AttributeError:
        foreign = (
            matcher for matcher in matchers if not isinstance(matcher, LlguidanceMatcher)
        )
        raise TypeError(f"{next(foreign)!r} was not made by this library") from None


def _consume(inner: "LLMatcher", update: MatcherUpdate) -> bool:
    """Have a matcher take its one token; whether that is allowed."""
    start = time.thread_time()
    is_allowed = inner.consume_token(update.tokens[0])
    update.slow = time.thread_time() - start > MASK_WAIT_SECONDS
    return is_allowed


def _error_of(inner: "LLMatcher") -> GrammarError:
    """Why a matcher cannot go on."""
    try:
        raise_if_failed(inner)
    except GrammarError as error:
        return error
    raise AssertionError("this matcher can go on")
