"""States of rows with drafts, which a step moves on once it is known which drafts are
accepted.

Theory. A recurrent layer reads the states of such rows in its forward, and does not write
them (kernels/state_work.py). It keeps its own inputs instead: what its first products
gave for the rows' tokens. After the last draft has been judged, each layer takes the
accepted of these inputs once more, and then the states are written. All of it is one
step's, in the same CUDA graph, so whatever copies or saves a state between steps, or
reads it in the next one, finds exactly the inputs that the row has taken.
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
    """The recurrent layers of a step with drafts, as they have run."""

    work: "StateWork"  # of the step
    num_inputs: int  # of decode rows, with their drafts: the first packed tokens
    moves: "list[Callable[[StateWork], Tensor]]" = field(factory=list)  # of each layer

    def keep(self, move: "Callable[..., Tensor]", inputs: "tuple[Tensor, ...]") -> None:
        """Keep a layer's inputs [tokens, ...] of decode rows and drafts, and the function
        of a `StateWork` and these inputs that moves its states on.
        """
        kept = [self._without_prompts(x) for x in inputs]
        self.moves.append(partial(_move, move, kept))

    def accept(self, drafts: "Tensor") -> None:
        """Move the states of rows with drafts on, by their last token and as many
        accepted `drafts` [rows with drafts] int32. Does not synchronise on a GPU.
        """
        work = self.work.accepted_work(drafts + 1)
        for move in self.moves:
            move(work)
        self.moves.clear()

    def _without_prompts(self, x: "Tensor") -> "Tensor":
        """Returns inputs without those of prompts, whose memory is free then."""
        if len(x) == self.num_inputs:
            return x
        return x[: self.num_inputs].clone()


def _move(
    move: "Callable[..., Tensor]", inputs: "list[Tensor]", work: "StateWork"
) -> "Tensor":
    return move(work, *inputs)
