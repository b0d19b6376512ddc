"""A draft head as a function of a batch and its target's cache."""

from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.draft_heads.head_step import (
    embed_for_head,
    head_logits,
    project_states,
    run_head,
    store_head,
)
from minfer.effects.models.draft_heads.head_weights import DraftHeadWeights
from minfer.effects.models.ranks import Communicator


@frozen(eq=False)
class LoadedHead:
    """A loaded draft head; its sizes are `ModelSpec.draft_head` of its target."""

    weights: DraftHeadWeights


@frozen(eq=False)
class HeadModel:
    """A head behind the last layer of its target, whose weights it shares."""

    target: ModelSpec
    head: HeadSpec
    target_weights: Weights
    weights: DraftHeadWeights
    ranks: Communicator

    def project(self, batch: Batch, cache: Cache, states: Tensor) -> Tensor:
        """Returns what the head reads [tokens, hidden] of the target's noted streams
        [tokens, layers * hidden].
        """
        step = self._step(batch, cache)
        return project_states(self.head, self.weights, self.target_weights, states, step)

    def store(self, batch: Batch, cache: Cache, before: Tensor) -> None:
        """Write the head's keys and values of all tokens of a batch, given the hidden
        states [tokens, hidden] before them.
        """
        step = self._step(batch, cache)
        embeddings = self._embeddings(batch, step)
        store_head(self.head, self.weights, embeddings, before, self._index, step)

    def draft(self, batch: Batch, cache: Cache, before: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the head's own states [tokens, hidden], and logits [tokens, vocab] of
        the tokens after a batch's.
        """
        step = self._step(batch, cache)
        embeddings = self._embeddings(batch, step)
        hidden = run_head(self.head, self.weights, embeddings, before, self._index, step)
        logits = head_logits(
            self.target, self.head, self.weights, self.target_weights, hidden, step
        )
        return hidden, logits

    @property
    def _index(self) -> int:
        """Of its layer in the cache."""
        return len(self.target.layers)

    def _step(self, batch: Batch, cache: Cache) -> ModelStep:
        products = ProductContext(batch.tokens.is_cuda, batch.fused, batch.real)
        return ModelStep(batch, cache, self.ranks, products)

    def _embeddings(self, batch: Batch, step: ModelStep) -> Tensor:
        return embed_for_head(
            self.target, self.weights, self.target_weights, batch.tokens, step
        )


def head_model_of(
    spec: ModelSpec,
    weights: Weights | Model,
    head_weights: DraftHeadWeights,
    ranks: Communicator,
) -> HeadModel:
    """Returns the function that runs the head of a target. Raises TypeError for a target
    without a head, or one that transformers' own model runs.
    """
    if spec.draft_head is None or not isinstance(weights, Weights):
        raise TypeError("only minfer's own forward pass has draft heads")
    return HeadModel(spec, spec.draft_head, weights, head_weights, ranks)
