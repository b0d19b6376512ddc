"""What the products of a step get besides tensors: what was chosen for the step, and what
differs by token.
"""

from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class ProductContext:
    """What holds for all products of a step, or for some of its tokens."""

    on_gpu: bool  # which kernels of a scheme multiply
    fused: bool = False  # as in `kernels.fused_linear.norm_gated`; `Routes` chose it
    # [tokens] bool: False for padding, which is sent to no expert; None: there is none,
    # or there are no experts
    real: "Tensor | None" = None

    def select(self, tokens: "Tensor") -> "ProductContext":
        """Returns the context of some of the tokens: `tokens` [selected] are indices."""
        if self.real is None:
            return self
        return evolve(self, real=self.real.index_select(0, tokens))
