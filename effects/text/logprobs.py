"""Log-probabilities for users: by token id, each with its rank and its text.

Log-probabilities of a prompt are parts of bytes, some perhaps twice
(`minfer.records.prompt_logprobs`); they are kept as they come, and read once, when the
consumer takes the output.
"""

from collections.abc import Sequence

from attrs import define, field

from minfer.effects.text.outputs import Logprob, PromptLogprobs
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.plan import TokenLogprobs
from minfer.records.prompt_logprobs import PromptPart, parts_of


def by_id(
    token: int, beside: TokenLogprobs, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """A token's log-probabilities by id, its own first."""
    ids = [token, *beside.likeliest]
    values = [beside.logprob, *beside.logprobs]
    ranks = [beside.rank, *range(1, len(ids))]
    return {
        one: Logprob(value, rank, text_of(one, tokenizer))
        for one, value, rank in zip(ids, values, ranks, strict=True)
    }


def text_of(token: int, tokenizer: Tokenizer | None) -> str | None:
    """A token's text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.token_bytes(token).decode(errors="replace")


@define(eq=False)
class PromptScores:
    """The log-probabilities of a prompt so far."""

    prompt: Sequence[int]  # token ids
    tokenizer: Tokenizer | None = None
    end: int = 1  # the index of the first token without any
    parts: list[PromptPart] = field(factory=list)
    read: PromptLogprobs | None = None

    @property
    def unread(self) -> bool:
        """Whether there are parts that were not read."""
        return bool(self.parts)

    def add(self, data: bytes) -> None:
        """Add parts; earlier ones are kept where they are. Raises ValueError."""
        for part in parts_of(data):
            if part.first <= self.end < part.first + part.count:
                self.parts.append(part)
                self.end = part.first + part.count

    def by_token(self) -> PromptLogprobs | None:
        """For each token, the first one's None; None if the prompt was not computed."""
        if self.read is None and self.end >= len(self.prompt):
            lines: list[TokenLogprobs] = []  # from the second token on
            for part in self.parts:
                known = len(lines) + 1 - part.first
                lines += map(part.line, range(known, part.count))
            self.parts.clear()
            each = zip(self.prompt[1:], lines, strict=True)
            scored = [by_id(token, line, self.tokenizer) for token, line in each]
            self.read = [None, *scored]
        return self.read
