"""Hidden states of a target that a draft head reads: residual streams between layers."""

from typing import TYPE_CHECKING, Final

from attrs import define

if TYPE_CHECKING:
    from torch import Tensor

BEHIND_LAST: Final = -1  # instead of a layer: behind all of them


@define(eq=False)
class LayerStates:
    """The residual stream of all tokens before the layers `layers`, or `BEHIND_LAST` of
    them: what a draft head reads. The model fills it.
    """

    layers: tuple[int, ...]
    # [tokens, layers * hidden]: side by side; None before the forward
    states: "Tensor | None" = None

    def note(self, index: int, hidden: "Tensor") -> None:
        """Copy the stream [tokens, hidden] before layer `index`, if it is read."""
        if self.states is None:
            # Warm-ups cut models short: then some columns mean nothing.
            size = len(self.layers) * hidden.shape[1]
            self.states = hidden.new_empty(len(hidden), size)
        if index not in self.layers:
            return
        begin = self.layers.index(index) * hidden.shape[1]
        self.states[:, begin : begin + hidden.shape[1]].copy_(hidden)
