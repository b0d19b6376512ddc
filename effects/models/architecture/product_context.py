"""What the products of a step get besides tensors: what was chosen for the step, and what
differs by token.
"""

from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.plain_lora import AdapterTokens


@frozen(eq=False)
class ProductContext:
    """What holds for all products of a step, or for some of its tokens."""

    on_gpu: bool  # which kernels of a scheme multiply
    fused: bool = False  # as in `kernels.fused_linear.norm_gated`; `Routes` chose it
    # [tokens] bool: False for padding, which is sent to no expert; None: there is none,
    # or there are no experts
    real: "Tensor | None" = None
    adapters: "AdapterTokens | None" = None  # None: no row has an adapter

    def select(self, tokens: "Tensor") -> "ProductContext":
        """Returns the context of some of the tokens: `tokens` [selected] are indices."""
        real, adapters = self.real, self.adapters
        return evolve(
            self,
            real=None if real is None else real.index_select(0, tokens),
            adapters=None if adapters is None else adapters.select(tokens),
        )
