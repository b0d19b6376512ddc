"""The interface to a library for grammars.

Theory. A grammar is compiled once, for a vocabulary. A matcher of it follows one output:
its state is a function of the grammar and of the tokens so far, so it can be rolled back
by tokens, dropped, and made again. For the next token it returns a mask, a bit for each
token id, the lowest first; the model's ends of sequence are allowed wherever the output
may end, and alone once it must.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from attrs import define

from minfer.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from minfer.effects.text.grammars.mask_lines import Lines

# Seconds for which one mask, or one token of a matcher, may delay a step. The masks of a
# request that exceeds it are made by threads, and its rows skip steps until they are
# there.
MASK_WAIT_SECONDS: Final = 5e-3


class GrammarError(ValueError):
    """A constraint cannot be used, or a matcher cannot go on; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class KeywordError(GrammarError):
    """A keyword of a schema cannot be enforced."""

    def __init__(self, message: str, word: str) -> None:
        super().__init__(message)
        self.word = word


class Matcher(Protocol):
    """The state of one output in a grammar. For one thread at a time."""

    served: int  # tokens of other outputs that went through it before

    def restart(self) -> None:
        """Reset it for another output. Raises GrammarError if that fails."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take new tokens. Raises GrammarError if they are not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def mask(self) -> bytes:
        """The tokens that may come next: a bit for each id. Other threads run meanwhile.

        Raises GrammarError where that takes more work than is allowed.
        """
        ...

    @property
    def may_end(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def must_end(self) -> bool:
        """Whether only an end of sequence may follow."""
        ...


class Grammar(Protocol):
    """A compiled constraint. Safe to share between threads."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        ...


@define(eq=False)  # frozen ones take twice as long to make, and there are many
class MatcherUpdate:
    """A matcher's next position: back by some tokens, then forward by others; and the
    line of its next mask.
    """

    matcher: Matcher
    num_rollback: int
    tokens: tuple[int, ...]
    line: int = 0
    slow: bool = False  # set by `Compiler.masks`: it took longer than MASK_WAIT_SECONDS


class Compiler(Protocol):
    """Compiles constraints for one vocabulary."""

    words: int  # of a line
    # Tokens that no output may have, whatever the masks allow.
    forbidden_tokens: frozenset[int]

    def masks(
        self, updates: Sequence[MatcherUpdate], lines: "Lines"
    ) -> dict[int, GrammarError]:
        """Update matchers of this compiler, each another one; then write the mask of each
        to its line. Returns errors of masks, by line, and marks updates that were `slow`.
        Uses all processors; other threads run meanwhile.

        Lines are contiguous. Lines with errors allow nothing, except for tokens in
        `forbidden_tokens`.
        """
        ...

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """A grammar, with the work of its first mask done. Raises GrammarError, which
        names the field. Other threads run meanwhile.
        """
        ...
