"""What a forward pass is about, as its layers get it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.cache import LayerState, PagedCache
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.ranks import Communicator

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.effects.models.architecture.batch import Batch
    from minfer.kernels.state_work import StateWork


@frozen(eq=False)
class ModelStep:
    """One packed step of a model."""

    batch: "Batch"
    cache: PagedCache
    communicator: Communicator  # of the ranks that run it, each with its part
    products: ProductContext
    layer_inputs: "Tensor | None" = None  # [tokens, layers, width], if layers have some

    def update_states(
        self, index: int, update: "Callable[..., Tensor]", *inputs: "Tensor"
    ) -> "Tensor":
        """Returns update(state, work, *inputs), which updates the states of the step's
        rows in layer `index`. The states of rows with drafts are updated later, once it
        is known which drafts are accepted: until then `inputs` [tokens, ...] are kept.
        """
        work, state = self.recurrence(index)
        update = partial(update, state)
        if self.batch.pending is not None:
            self.batch.pending.keep(update, inputs)
        return update(work, *inputs)

    def recurrence(self, index: int) -> tuple["StateWork", LayerState]:
        """Returns the rows whose states the step updates, and where layer `index` keeps
        them. Raises ValueError for a batch without states.
        """
        if self.batch.states is None:
            raise ValueError(f"layer {index} keeps a state, but the batch has no states")
        return self.batch.states, self.cache.state(index)

    def select(self, tokens: "Tensor") -> "ModelStep":
        """Returns the step for some of the tokens: `tokens` [selected] are indices."""
        inputs = self.layer_inputs
        return evolve(
            self,
            products=self.products.select(tokens),
            layer_inputs=None if inputs is None else inputs.index_select(0, tokens),
        )


@frozen(eq=False)
class KeptTokens:
    """The tokens that the last layer continues with behind its attention."""

    tokens: "Tensor"  # [kept] indices
    step: ModelStep  # for these tokens
