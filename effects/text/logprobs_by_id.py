"""Log-probabilities for users: by token id, each with its rank and its text.

Log-probabilities of a prompt come in chunks of bytes, and some may come twice
(`minfer.records.token_logprobs`); they are kept as bytes, and read once, when the
consumer takes the output.
"""

from collections import deque
from collections.abc import Sequence

from attrs import define, field

from minfer.effects.text.outputs import Logprob, PromptLogprobs
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.token_logprobs import TokenLogprobs, unpack_parts


def logprobs_by_id(
    entry: TokenLogprobs, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """A token's log-probabilities by id, its own first."""
    ids = [entry.token, *entry.likeliest]
    values = [entry.logprob, *entry.logprobs]
    ranks = [entry.rank, *range(1, len(ids))]
    return {
        token: Logprob(value, rank, decode_token(token, tokenizer))
        for token, value, rank in zip(ids, values, ranks, strict=True)
    }


def decode_token(token: int, tokenizer: Tokenizer | None) -> str | None:
    """A token's text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.token_bytes(token).decode(errors="replace")


@define(eq=False)
class PromptScores:
    """The log-probabilities of a prompt so far."""

    prompt: Sequence[int]  # token ids
    tokenizer: Tokenizer | None = None
    # Chunks are added while others are read.
    unread_chunks: deque[bytes] = field(factory=deque)
    entries: PromptLogprobs = field(factory=lambda: [None])

    def by_token(self) -> PromptLogprobs | None:
        """For each token, the first one's None; None if the prompt was not computed.
        Raises ValueError.
        """
        while self.unread_chunks:
            for position, entry in unpack_parts(
                self.unread_chunks.popleft(), self.prompt
            ):
                if position == len(self.entries):
                    self.entries.append(logprobs_by_id(entry, self.tokenizer))
        return self.entries if len(self.entries) >= len(self.prompt) else None
