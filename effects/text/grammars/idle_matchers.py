"""Matchers whose outputs have ended, kept for the next output of the same constraint.

Theory. A matcher computes masks of its grammar as it needs them, and caches them beyond
one output: with an ordinary schema its first dozen masks take several times as long as
those that follow. Besides, to make a matcher is to compile the constraint again. So a
request with a constraint that was used before gets a used matcher, reset to its start. A
matcher serves one output at a time; as many outputs, as many matchers.

The cache takes memory, and counts against the library's limits. So no matcher is reused
for ever; and if a used matcher fails, that does not blame its constraint: the output goes
through a new one. (How far an output gets before it exceeds those limits, as no ordinary
one does, may so depend on what its first matcher had cached.)
"""

import threading
from collections import OrderedDict
from typing import Final

from minfer.effects.text.grammars.grammar_library import GrammarError, Matcher
from minfer.sampling.structured import StructuredOutputs

# As many as an engine has rows by default: where fewer are kept and outputs end at about
# the same time, the next ones wait for new matchers. One takes 0.3 to 0.5 MB with an
# ordinary schema, 0.8 with twenty tools (12,500 characters), and up to 10 MB where texts
# have bounds within bounds. A matcher's weight is 1, and 1 more for each
# CHARACTERS_PER_WEIGHT characters of its constraint. At most MAX_CONSTRAINTS constraints
# have matchers here.
MAX_TOTAL_WEIGHT: Final = 256
CHARACTERS_PER_WEIGHT: Final = 24_576
MAX_CONSTRAINTS: Final = 16
# Tokens of outputs after which a matcher is dropped. With ordinary schemas it does not
# grow after the first 256 tokens.
MAX_SERVED_TOKENS: Final = 16_384


class IdleMatchers:
    """Matchers that are not in use. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The constraint that was used last comes last.
        self._matchers: OrderedDict[StructuredOutputs, list[Matcher]] = OrderedDict()
        self._total_weight = 0

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._matchers.values()))

    def put(self, constraint: StructuredOutputs, matcher: Matcher, tokens: int) -> None:
        """Keep a matcher that is free again, after an output of `tokens` tokens;
        others are dropped if the total weight is too large.
        """
        matcher.served += tokens
        if matcher.served > MAX_SERVED_TOKENS:
            return
        try:
            matcher.restart()
        except GrammarError:  # its output ended with an error
            return
        with self._lock:
            self._matchers.setdefault(constraint, []).append(matcher)
            self._matchers.move_to_end(constraint)
            self._total_weight += _weight(constraint)
            while (
                self._total_weight > MAX_TOTAL_WEIGHT
                or len(self._matchers) > MAX_CONSTRAINTS
            ):
                self._drop(next(iter(self._matchers)))

    def take(self, constraint: StructuredOutputs) -> Matcher | None:
        """A used matcher for a new output, reset; None if there is none."""
        with self._lock:
            if constraint not in self._matchers:
                return None
            self._matchers.move_to_end(constraint)
            return self._drop(constraint)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._matchers.clear()
            self._total_weight = 0

    def _drop(self, constraint: StructuredOutputs) -> Matcher:
        """Remove one matcher; the caller holds the lock."""
        matchers = self._matchers[constraint]
        matcher = matchers.pop()
        self._total_weight -= _weight(constraint)
        if not matchers:
            del self._matchers[constraint]
        return matcher


def _weight(constraint: StructuredOutputs) -> int:
    return 1 + len(constraint.text) // CHARACTERS_PER_WEIGHT
