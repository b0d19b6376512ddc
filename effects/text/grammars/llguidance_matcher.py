"""Matchers of one output, by llguidance.

Its matchers never raise; they enter a state of error, which is tested after each call.

A token takes microseconds. Where a grammar is ambiguous it takes up to 0.4 s, the more
the longer the output is; and the library holds Python's lock meanwhile, so that the
engine would stop. It does not hold the lock while several matchers take a token at once.
So once a token took longer than MASK_WAIT_SECONDS, a second matcher takes each of the
following ones at the same time; its result is not used.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from minfer.effects.text.grammars.grammar_library import (
    MASK_WAIT_SECONDS,
    GrammarError,
    Matcher,
)
from minfer.effects.text.grammars.job_threads import SLOW_WORK_THREADS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Threads of slow matchers, and one for all companions.
COMPANION_THREADS: Final = 1 + SLOW_WORK_THREADS
MAX_MASK_SECONDS: Final = 0.1  # of a processor, for one mask
# An option that no client can set.
_ADVICE: Final = re.compile(r"\. Enable 'coerce_one_of' option[^.\n]*")
# What the library says of patterns has them in its own words, not in the user's.
_PATTERN_ERRORS: Final = (
    (
        re.compile(r"Regex is empty:.*", re.DOTALL),
        "no text has the pattern, the format and the length that are given; drop one",
    ),
    (
        re.compile(r"\Aregex parse error:\n.*\nerror: (.*)", re.DOTALL),
        r"a pattern is no regular expression: \1",
    ),
    (
        re.compile(r"\Alookarounds not supported yet; .*", re.DOTALL),
        "a pattern can have '^' at its beginning and '$' at its end only",
    ),
)
MAX_ERROR_CHARS: Final = 300  # of the library's errors that are passed on


class Companions:
    """Has slow matchers take tokens while other threads run."""

    def __init__(self, make: "Callable[[], LLMatcher]") -> None:
        """`make`: a matcher of any grammar."""
        self.make = make
        # Not the executor that makes masks for steps: a slow token would delay those.
        self._executor: LLExecutor | None = None

    def take(self, inner: "LLMatcher", companion: "LLMatcher", token: int) -> None:
        """Have a matcher take a token, together with its companion."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(COMPANION_THREADS)
        self._executor.consume_token_par([(inner, token), (companion, token)])


class LlguidanceMatcher(Matcher):
    """The matcher of one output. Its masks may allow the token that stands for an end of
    sequence, which must not be sampled (`Compiler.forbidden_tokens`).
    """

    def __init__(self, inner: "LLMatcher", companions: Companions) -> None:
        self.inner = inner
        self._companions = companions
        self._companion: LLMatcher | None = None  # of one that is slow
        self.served = 0

    @override
    def restart(self) -> None:
        raise_if_failed(self.inner)
        self.inner.reset()
        raise_if_failed(self.inner)
        self._companion = None

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """Other threads run meanwhile, once a token has taken long."""
        for token in tokens:
            if self._companion is not None:
                self._companions.take(self.inner, self._companion, token)
            else:
                start = time.thread_time()
                self.inner.consume_token(token)
                if time.thread_time() - start > MASK_WAIT_SECONDS:
                    self._companion = self._companions.make()
            raise_if_failed(self.inner)

    @override
    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)
            raise_if_failed(self.inner)

    @override
    def mask(self) -> bytes:
        start = time.thread_time()
        bits: bytes = self.inner.compute_bitmask()
        raise_if_failed(self.inner)
        if (spent := time.thread_time() - start) > MAX_MASK_SECONDS:
            raise GrammarError(
                f"took {spent:.2f} s to say what may come next, of at most "
                f"{MAX_MASK_SECONDS}; make it simpler"
            )
        return bits

    @property
    @override
    def may_end(self) -> bool:
        return self.inner.is_accepting()

    @property
    @override
    def must_end(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()


def raise_if_failed(inner: "LLMatcher") -> None:
    """Raise GrammarError if the library could not go on."""
    if not inner.is_error():
        return
    message = shorten_error(inner.get_error())
    if message.startswith("NoExtension"):
        message = "there is no text that it allows"
    raise GrammarError(message)


def shorten_error(error: object) -> str:
    """The library's message, shortened."""
    text = str(error).replace("<non-verbose/>", "").strip()
    text = _ADVICE.sub("; its parts must exclude each other: say anyOf instead", text)
    for pattern, in_words in _PATTERN_ERRORS:
        text = pattern.sub(in_words, text)
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
