"""Models that run by minfer's own forward pass, as a function of a batch and a cache.
Others run by a class of transformers (`models.fallback`), with the same signature.
"""

from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Cache
from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.model import Model, forward
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.ranks import SINGLE_RANK, Communicator, StageIO


@frozen(eq=False)
class OwnModel:
    """A model that runs by minfer's own forward pass."""

    spec: ModelSpec
    weights: Weights
    ranks: Communicator = SINGLE_RANK  # that run it together
    # How the stage gets its inputs and passes on its outputs; None: the ranks do that.
    ends: StageIO | None = None

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        """Returns logits [sampled, vocab] of a packed step."""
        return forward(self.spec, self.weights, batch, cache, self.ranks, self.ends)

    def with_few_layers(self) -> "OwnModel":
        """Returns the model with its first layers only: up to the first layer of each
        type, and one more, as the last layer is narrowed to the sampled tokens. It
        launches the same kernels, fewer times.
        """
        layers = self.spec.layers
        count = max(layers.index(layer) for layer in layers) + 2
        return OwnModel(
            evolve(self.spec, layers=layers[:count]),
            evolve(self.weights, layers=self.weights.layers[:count]),
            self.ranks,
            self.ends,
        )


def model_of(
    spec: ModelSpec,
    weights: Weights | Model,
    ranks: Communicator = SINGLE_RANK,
    ends: StageIO | None = None,
) -> Model:
    """Returns the function that runs the model; `weights` may be that function."""
    if not isinstance(weights, Weights):
        return weights
    return OwnModel(spec, weights, ranks, ends)
