"""The dry executor: plausible text without weights, for trying the interfaces.

Every sample writes a built-in passage, from its beginning if sampling is greedy and else
from a sentence that seed and sample choose; a request with stop ids stops at the end of
the passage. The token at a position depends on the request and the position only, so
preemption, chunking and other requests change nothing, as with a model.
"""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import evolve

from minfer.records.plan import Plan
from minfer.sampling.reference_sampler import RowSampling
from minfer.simulation.oracle import Offer, Oracle, OracleRow, vector_of

PASSAGE: Final = (
    " This text was not written by a model.",
    (
        " The engine planned every step of it, gave it blocks of the cache, and took "
        "them back."
    ),
    (
        " Only the forward pass was left out, so that you can try the interfaces without "
        "weights."
    ),
    (
        " Requests come and go, share their prefixes, and queue up as they would in "
        "earnest."
    ),
    " When you have seen enough, start again with a model.\n",
)


def encoded_passage(
    encode: Callable[[str], Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    """Returns the built-in passage as token ids, a tuple for each sentence; sentences
    without tokens are left out.
    """
    return tuple(filter(None, (tuple(encode(sentence)) for sentence in PASSAGE)))


class DryExecutor(Oracle):
    """An oracle without a memory, which writes `sentences`, of at least one token id in
    all.
    """

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        if not any(sentences):
            raise ValueError("a dry executor needs a passage of at least one token")
        super().__init__(block_size=1, vocab=0)  # both are for the memory
        self.sentences = [tuple(sentence) for sentence in sentences if sentence]

    def launch(self, plan: Plan) -> None:
        """Queue the plan, without states to save: there is no memory."""
        super().launch(evolve(plan, saves=()) if plan.saves else plan)

    def add_adapter(self, digest: bytes, folder: str) -> None:
        """Do nothing: adapters change made-up text as little as weights do."""

    def remove_adapter(self, digest: bytes) -> None:
        """Do nothing."""

    def token(self, sampling: RowSampling, prompt: int, position: int) -> int:
        """Returns the token at a position, which must be behind the `prompt` tokens of
        the prompt.
        """
        greedy = sampling.temperature == 0
        first = 0 if greedy else (sampling.seed + sampling.sample) % len(self.sentences)
        passage = [
            t for s in (*self.sentences[first:], *self.sentences[:first]) for t in s
        ]
        index = position - prompt
        if sampling.stop_ids and index >= len(passage):
            return min(sampling.stop_ids)
        return passage[index % len(passage)]

    def _write(self, row: OracleRow, tokens: tuple[int, ...]) -> None:
        row.next += len(tokens)

    def _vector(self, row: OracleRow) -> bytes:
        return vector_of(hash((row.prompt, row.pooling == "mean")))

    def _likeliest(self, row: OracleRow, count: int) -> Offer:
        """Returns the passage's token as by far the likeliest, and its other tokens as
        others.
        """
        likeliest = self._draw(row)
        other_tokens = {token for sentence in self.sentences for token in sentence} - {
            likeliest
        }
        tokens = (likeliest, *sorted(other_tokens)[: count - 1])
        return tokens, tuple(-0.1 - 5.0 * place for place in range(len(tokens)))

    def _draw(self, row: OracleRow) -> int:
        return self.token(row.sampling, row.prompt, row.next)
