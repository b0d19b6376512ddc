"""Matchers of one output, by llguidance.

Its matchers never raise; they enter a state of error, which is tested after each call.

A token takes microseconds. Where a grammar is ambiguous it takes up to 0.4 s, the more
the longer the output is; and the library holds Python's lock meanwhile, so that the
engine would stop. It does not hold the lock while several matchers take a token at once.
So once a token took longer than MASK_WAIT, a second matcher takes each of the following
ones at the same time; its result is not used.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from minfer.effects.text.grammars.grammar_library import MASK_WAIT, GrammarError, Matcher
from minfer.effects.text.grammars.job_threads import FOR_SLOW

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

PAIRED: Final = 1 + FOR_SLOW  # threads of slow matchers, and one for all companions
MOST_SECONDS: Final = 0.1  # of a processor, for one mask
# An option that no client can set.
_ADVICE: Final = re.compile(r"\. Enable 'coerce_one_of' option[^.\n]*")
# What the library says of patterns has them in its own words, not in the user's.
_OF_PATTERNS: Final = (
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
MOST_CHARS: Final = 300  # of the library's errors that are passed on


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

            self._executor = LLExecutor(PAIRED)
        self._executor.consume_token_par([(inner, token), (companion, token)])


class LlguidanceMatcher(Matcher):
    """The matcher of one output. Its masks may allow the token that stands for an end of
    sequence, which must not be sampled (`Compiler.never`).
    """

    def __init__(self, inner: "LLMatcher", companions: Companions) -> None:
        self.inner = inner
        self._companions = companions
        self._companion: LLMatcher | None = None  # of one that is slow
        self.served = 0

    @override
    def restart(self) -> None:
        check(self.inner)
        self.inner.reset()
        check(self.inner)
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
                if time.thread_time() - start > MASK_WAIT:
                    self._companion = self._companions.make()
            check(self.inner)

    @override
    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)
            check(self.inner)

    @override
    def mask(self) -> bytes:
        start = time.thread_time()
        bits: bytes = self.inner.compute_bitmask()
        check(self.inner)
        if (spent := time.thread_time() - start) > MOST_SECONDS:
            raise GrammarError(
                f"took {spent:.2f} s to say what may come next, of at most "
                f"{MOST_SECONDS}; make it simpler"
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


def check(inner: "LLMatcher") -> None:
    """Raise GrammarError if the library could not go on."""
    if not inner.is_error():
        return
    message = cut(inner.get_error())
    if message.startswith("NoExtension"):
        message = "there is no text that it allows"
    raise GrammarError(message)


def cut(error: object) -> str:
    """The library's message, shortened."""
    text = str(error).replace("<non-verbose/>", "").strip()
    text = _ADVICE.sub("; its parts must exclude each other: say anyOf instead", text)
    for pattern, in_words in _OF_PATTERNS:
        text = pattern.sub(in_words, text)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."
