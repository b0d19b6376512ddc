"""A step's outputs besides tokens: pooled vectors and log-probabilities of prompts.

A step with pooled or scored rows has an `Errand`: it adds to the batch what the model has
to output, and puts the results into the slot that the step's tokens are read from.
"""

from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.packing.pack_plan import Forward
from minfer.effects.execution.packing.pooling import Pooler, Wanted
from minfer.effects.execution.packing.prompt_scores import Scorer, Targets
from minfer.effects.execution.packing.read_back import Slot
from minfer.effects.models.batch import Batch, Scored, Tap


@frozen(eq=False)
class States:
    """Requested hidden states, and the buffer for them."""

    wanted: Wanted
    tap: Tap


@frozen(eq=False)
class Scores:
    """Tokens to score, and the buffer for the results."""

    targets: Targets
    scored: Scored
    found: Tensor


@frozen(eq=False)
class Errand:
    """One step's outputs besides tokens."""

    pooler: Pooler
    scorer: Scorer
    states: States | None
    scores: Scores | None

    @classmethod
    def of(cls, forward: Forward, pooler: Pooler, scorer: Scorer) -> "Errand | None":
        """Returns a forward's further outputs; None if it has only tokens."""
        wanted, targets = forward.wanted, forward.targets
        if wanted is None and targets is None:
            return None
        states = None if wanted is None else States(wanted, pooler.tap(wanted))
        scores = None if targets is None else Scores(targets, *scorer.scored(targets))
        return cls(pooler, scorer, states, scores)

    def added(self, batch: Batch) -> Batch:
        """Returns the batch with the further outputs that the model has to compute."""
        return evolve(
            batch,
            tap=None if self.states is None else self.states.tap,
            scored=None if self.scores is None else self.scores.scored,
        )

    def bring(self, slot: Slot) -> None:
        """Start copying the outputs to the host, after the model ran."""
        if self.states is not None:
            tap = self.states.tap
            slot.vectors = self.pooler.pool(self.states.wanted, tap.states)
        if self.scores is not None:
            found = self.scorer.fetched(self.scores.targets, self.scores.found)
            slot.prompt_scores = found
