"""For compilers that tests make up: masks of several rows, one after the other."""

from collections.abc import Sequence

from minfer.effects.text.grammars.protocol import GrammarError, Move


class OneByOne:
    """Moves matchers, and has each make its own mask."""

    def masks(self, moves: Sequence[Move]) -> list[bytes | GrammarError]:
        """As `Compiler` says."""
        return [self._mask(move) for move in moves]

    @staticmethod
    def _mask(move: Move) -> bytes | GrammarError:
        try:
            move.matcher.rollback(move.back)
            move.matcher.advance(move.tokens)
            return move.matcher.mask()
        except GrammarError as error:
            return error
