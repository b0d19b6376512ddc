"""What a step is asked for besides tokens: vectors and log-probabilities of prompts.

A step with rows that are pooled or scored takes an `Errand` along: it adds to the batch
what the model is to hand out, and brings what came of it to the slot in which the step's
tokens come back.
"""

from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.packing import Forward
from minfer.effects.execution.pooling import Pooler, Wanted
from minfer.effects.execution.prompt_scores import Scorer, Targets
from minfer.effects.execution.read_back import Slot
from minfer.effects.models.batch import Batch, Scored, Tap


@frozen(eq=False)
class States:
    """Hidden states that are wanted, and where they will be."""

    wanted: Wanted
    tap: Tap


@frozen(eq=False)
class Scores:
    """Tokens that are scored, and where what is found will be."""

    targets: Targets
    scored: Scored
    found: Tensor


@frozen(eq=False)
class Errand:
    """What one step is asked for."""

    pooler: Pooler
    scorer: Scorer
    states: States | None
    scores: Scores | None

    @classmethod
    def of(cls, forward: Forward, pooler: Pooler, scorer: Scorer) -> "Errand | None":
        """What a forward is asked for; None: tokens are all."""
        wanted, targets = forward.wanted, forward.targets
        if wanted is None and targets is None:
            return None
        states = None if wanted is None else States(wanted, pooler.tap(wanted))
        scores = None if targets is None else Scores(targets, *scorer.scored(targets))
        return cls(pooler, scorer, states, scores)

    def added(self, batch: Batch) -> Batch:
        """The batch, with what the model is to hand out."""
        return evolve(
            batch,
            tap=None if self.states is None else self.states.tap,
            scored=None if self.scores is None else self.scores.scored,
        )

    def bring(self, slot: Slot) -> None:
        """Once the model ran: what came of it, on its way to the host."""
        if self.states is not None:
            tap = self.states.tap
            slot.vectors = self.pooler.pool(self.states.wanted, tap.states)
        if self.scores is not None:
            found = self.scorer.fetched(self.scores.targets, self.scores.found)
            slot.prompt_scores = found
