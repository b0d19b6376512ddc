"""One output's way through a grammar, by llguidance.

Its matchers never raise; they fall into a state of error, which is looked for after each
call.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from minfer.effects.text.grammars.protocol import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_SECONDS: Final = 0.1  # of a processor, for one mask
MOST_CHARS: Final = 300  # of the library's errors that are handed on


class LlguidanceMatcher:
    """One output on its way. Its masks allow `stand_in`, if there is one, for an end of
    sequence: who draws must not (`Compiler.never`).
    """

    def __init__(self, inner: "LLMatcher", stand_in: int | None) -> None:
        self.inner = inner
        self._stand_in = stand_in

    def advance(self, tokens: Sequence[int]) -> None:
        """As `Matcher` says."""
        self.inner.consume_tokens(list(tokens))
        check(self.inner)

    def rollback(self, count: int) -> None:
        """As `Matcher` says."""
        if count:
            self.inner.rollback(count)
            check(self.inner)

    def mask(self) -> bytes:
        """As `Matcher` says."""
        begun = time.thread_time()
        bits: bytes = self.inner.compute_bitmask()
        check(self.inner)
        if (spent := time.thread_time() - begun) > MOST_SECONDS:
            raise GrammarError(
                f"took {spent:.2f} s to say what may come next, of at most "
                f"{MOST_SECONDS}; make it simpler"
            )
        return bits

    @property
    def may_end(self) -> bool:
        """As `Matcher` says."""
        return self.inner.is_accepting()

    @property
    def must_end(self) -> bool:
        """As `Matcher` says."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def forced(self) -> int | None:
        """As `Matcher` says."""
        allowed = int.from_bytes(self.mask(), "little")
        if self._stand_in is not None:
            allowed &= ~(1 << self._stand_in)
        return allowed.bit_length() - 1 if allowed.bit_count() == 1 else None


def check(inner: "LLMatcher") -> None:
    """Raise GrammarError if the library could not go on."""
    if not inner.is_error():
        return
    said = cut(inner.get_error())
    if said.startswith("NoExtension"):
        said = "there is no text that it allows"
    raise GrammarError(said)


def cut(error: object) -> str:
    """What the library says, made short."""
    text = str(error).replace("<non-verbose/>", "").strip()
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."
