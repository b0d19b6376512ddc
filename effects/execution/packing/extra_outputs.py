"""A step's outputs besides tokens: pooled vectors and log-probabilities of prompts.

A step with pooled or scored rows has an `ExtraOutputs`: it adds to the batch what the
model has to output, and puts the results into the slot that the step's tokens are read
from.
"""

from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.packing.pack_plan import Forward
from minfer.effects.execution.packing.pooling import PooledStates, Pooler
from minfer.effects.execution.packing.prompt_scores import ScoredTokens, Scorer
from minfer.effects.execution.packing.read_back import HostSlot
from minfer.effects.models.architecture.batch import Batch, ChunkedLogits, TappedTokens


@frozen(eq=False)
class PooledOutput:
    """Requested hidden states, and the buffer for them."""

    pooled: PooledStates
    tap: TappedTokens


@frozen(eq=False)
class ScoredOutput:
    """Tokens to score, and the buffer for the results."""

    tokens: ScoredTokens
    scored: ChunkedLogits
    buffer: Tensor


@frozen(eq=False)
class ExtraOutputs:
    """One step's outputs besides tokens."""

    pooler: Pooler
    scorer: Scorer
    states: PooledOutput | None
    scores: ScoredOutput | None

    @classmethod
    def of(
        cls, forward: Forward, pooler: Pooler, scorer: Scorer
    ) -> "ExtraOutputs | None":
        """Returns a forward's further outputs; None if it has only tokens."""
        pooled, scored = forward.pooled, forward.scored
        if pooled is None and scored is None:
            return None
        states = None if pooled is None else PooledOutput(pooled, pooler.tap(pooled))
        scores = None if scored is None else ScoredOutput(scored, *scorer.scored(scored))
        return cls(pooler, scorer, states, scores)

    def add_to(self, batch: Batch) -> Batch:
        """Returns the batch with the further outputs that the model has to compute."""
        return evolve(
            batch,
            tap=None if self.states is None else self.states.tap,
            scored=None if self.scores is None else self.scores.scored,
        )

    def fetch(self, slot: HostSlot) -> None:
        """Start copying the outputs to the host, after the model ran."""
        if self.states is not None:
            tap = self.states.tap
            slot.vectors = self.pooler.pool(self.states.pooled, tap.states)
        if self.scores is not None:
            prompt_scores = self.scorer.fetched(self.scores.tokens, self.scores.buffer)
            slot.prompt_scores = prompt_scores
