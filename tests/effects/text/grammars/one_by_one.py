"""For compilers that tests make up: masks of several rows, one after the other."""

from collections.abc import Sequence

from attrs import define

from minfer.effects.text.grammars.grammar_library import GrammarError, MatcherUpdate
from minfer.effects.text.grammars.mask_lines import Lines, fill


@define(kw_only=True)
class OneByOne:
    """Moves matchers, and has each make its own mask."""

    words: int = 1  # of a line
    forbidden_tokens: frozenset[int] = frozenset()

    def masks(
        self, updates: Sequence[MatcherUpdate], lines: Lines
    ) -> dict[int, GrammarError]:
        """As `Compiler` says."""
        errors = {}
        for move in updates:
            try:
                move.matcher.rollback(move.num_rollback)
                move.matcher.advance(move.tokens)
                fill(lines[move.line], move.matcher.mask())
            except GrammarError as error:
                errors[move.line] = error
        return errors
