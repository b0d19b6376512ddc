"""What requests ask: random prompts, a trace's, or those of a file.

A prompt is made when its request's turn comes, from its number alone: processes need not
share them, and none waits for a hundred thousand to be made. Random tokens are drawn from
a table of them already written as JSON, as a prompt of 20,000 tokens must not hold up the
event loop in which others' tokens are being timed.

Prompts of random tokens share no prefix but the one they are given, and differ from run
to run: otherwise a server's prefix cache would be measured, and nothing else.
"""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, Final, Protocol

from attrs import evolve, frozen

from minfer.effects.runs.arrivals import Row

FIRST_ID: Final = 16  # special tokens are below it, if not at the vocabulary's end
_DRAWN: Final = 2**16  # entries of a table: two random bytes choose one
# Where a prompt is text: words that most tokenizers know as one token.
_WORDS: Final = (
    "the of and to in is that it was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which "
    "she do how their if will up other about out many then them these so some her would "
    "make like him into time has look two more write go see number no way could people"
)


@frozen
class Ask:
    """A prompt as JSON, and how many tokens are to be written."""

    prompt: bytes
    max_tokens: int


@frozen
class Tokens:
    """Where random tokens come from: ids below `vocab_size`, or words."""

    vocab_size: int = 2000
    words: bool = False

    def draw(self, seed: str, count: int) -> list[bytes]:
        """So many tokens, each as a part of JSON; equal seeds give equal ones."""
        rng = Random(seed)  # noqa: S311 - a load keeps no secrets
        table = _table(self.vocab_size, self.words)
        return [table[i] for i in array("H", rng.randbytes(2 * count))]

    def joined(self, tokens: Iterable[bytes]) -> bytes:
        """A prompt as JSON: a string of words, or a list of ids."""
        if self.words:
            return b'"' + b" ".join(tokens) + b'"'
        return b"[" + b",".join(tokens) + b"]"


@cache
def _table(vocab_size: int, words: bool) -> list[bytes]:
    """Tokens to draw from."""
    ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
    known = (
        [word.encode() for word in _WORDS.split()] if words else [b"%d" % i for i in ids]
    )
    return [known[i % len(known)] for i in range(_DRAWN)]


class Prompts(Protocol):
    """What is asked: the same for the same number, in any process."""

    def ask(self, number: int) -> Ask:
        """The prompt of a request; numbers below 0 are those of warm-up."""

    def of_run(self, run: int) -> "Prompts":
        """Those of another run of the same load."""


@frozen
class RandomPrompts:
    """Random tokens behind a prefix that all prompts share."""

    tokens: Tokens
    input_len: int
    output_len: int
    range_ratio: float = 0.0  # lengths are uniform within this share of themselves
    prefix_len: int = 0
    seed: str = "0"

    def ask(self, number: int) -> Ask:
        """The prompt of a request."""
        seed = f"{self.seed}/{number}"
        rng = Random(f"{seed}/lengths")  # noqa: S311 - a load keeps no secrets
        length = _around(rng, self.input_len, self.range_ratio)
        output = _around(rng, self.output_len, self.range_ratio)
        # The prefix is every run's: whoever asks for one wants to see it hit.
        prefix = self.tokens.draw(self.seed.partition("/")[0], self.prefix_len)
        own = self.tokens.draw(seed, length)
        return Ask(self.tokens.joined(prefix + own), output)

    def of_run(self, run: int) -> "RandomPrompts":
        """Other tokens behind the same prefix."""
        return evolve(self, seed=f"{self.seed.partition('/')[0]}/{run}")


def _around(rng: Random, mean: int, ratio: float) -> int:
    """A length within a share of its mean."""
    return rng.randint(
        max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    )


@frozen
class TracePrompts:
    """Random tokens of a trace's lengths, which begin alike where the trace says so."""

    tokens: Tokens
    rows: Sequence[Row]
    seed: str = "0"

    def ask(self, number: int) -> Ask:
        """The prompt of a request; warm-up asks the same lengths of other tokens."""
        row, warm = self.rows[number % len(self.rows)], min(number, 0)
        drawn: list[bytes] = []
        for place, name in enumerate(row.ids, 1):
            left = row.prompt - len(drawn)
            count = left if place == len(row.ids) else min(row.span, left)
            drawn += self.tokens.draw(f"{self.seed}/{warm}/{name}", count)
        return Ask(self.tokens.joined(drawn), max(1, row.output))

    def of_run(self, run: int) -> "TracePrompts":
        """Other tokens in the same places."""
        return evolve(self, seed=f"{self.seed.partition('/')[0]}/{run}")


@frozen
class Listed:
    """A prompt that is given: text, token ids or, in a chat, messages."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    max_tokens: int


@frozen
class ListedPrompts:
    """Prompts that are given, one after the other, and again from the first."""

    prompts: Sequence[Listed]

    def ask(self, number: int) -> Ask:
        """The prompt of a request."""
        one = self.prompts[number % len(self.prompts)]
        told = json.dumps(one.prompt, ensure_ascii=False, separators=(",", ":"))
        return Ask(told.encode("utf-8", "replace"), one.max_tokens)

    def of_run(self, run: int) -> "ListedPrompts":  # noqa: ARG002 - they are as given
        """The same."""
        return self
