"""States of rows with drafts, which a step updates once it is known which drafts are
accepted.

Theory. A recurrent layer reads the states of such rows in its forward, and does not write
them (kernels/state_work.py). It keeps its own inputs instead: what its first products
gave for the rows' tokens. After the last draft has been judged, each layer takes the
accepted of these inputs once more, and writes the states. All of this happens within one
step, in the same CUDA graph. So a state that is copied, saved or read after the step has
taken in exactly the inputs that its row keeps.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.state_work import StateWork


@define(eq=False)
class PendingStates:
    """The inputs of the recurrent layers that a step with drafts has run so far."""

    work: "StateWork"  # of the step
    num_inputs: int  # of decode rows, with their drafts: the first packed tokens
    updates: "list[Callable[[StateWork], Tensor]]" = field(factory=list)  # of each layer

    def keep(self, update: "Callable[..., Tensor]", inputs: "tuple[Tensor, ...]") -> None:
        """Keep a layer's inputs [tokens, ...], those of decode rows and drafts, and
        `update`, which updates the layer's states: a function of a `StateWork` and these
        inputs.
        """
        kept = [self._without_prompts(x) for x in inputs]
        self.updates.append(partial(_call, update, kept))

    def accept(self, num_accepted: "Tensor") -> None:
        """Update the states of rows with drafts by their last token and the first
        `num_accepted` [rows with drafts] int32 of their drafts. Does not synchronise on a
        GPU.
        """
        work = self.work.accepted_work(num_accepted + 1)
        for update in self.updates:
            update(work)
        self.updates.clear()

    def _without_prompts(self, x: "Tensor") -> "Tensor":
        """Returns inputs without those of prompts, so that their memory can be freed."""
        if len(x) == self.num_inputs:
            return x
        return x[: self.num_inputs].clone()


def _call(
    update: "Callable[..., Tensor]", inputs: "list[Tensor]", work: "StateWork"
) -> "Tensor":
    return update(work, *inputs)
