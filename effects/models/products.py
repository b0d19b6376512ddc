"""Which kernel multiplies with a `Linear`: chosen here, by its scheme and where it is.

Three products are all that a model is made of: one with the norm before it inside, one
with the gate after it inside, and one whose result is added to the residual stream. What
kernels fuse with them is theirs; a scheme without a kernel is refused by name.

torch is imported with the first product: sizes of models are read without.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

from attrs import frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.linear import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor


class Products(Protocol):
    """What a module of kernels does with plain matrices; see `minfer.kernels.plain`."""

    def norm_linear(
        self,
        x: "Tensor",
        norm_weight: "Tensor",
        eps: float,
        weight: "Tensor",
        bias: "Tensor | None" = None,
    ) -> "Tensor":
        """rms_norm(x) @ weight.T + bias."""
        ...

    def norm_gated(
        self,
        x: "Tensor",
        norm_weight: "Tensor",
        eps: float,
        gate_up: "Tensor",
        bias: "Tensor | None" = None,
        fused: bool = False,
    ) -> "Tensor":
        """silu(gate) * up of [gate, up] = rms_norm(x) @ gate_up.T + bias."""
        ...

    def linear_add(
        self,
        residual: "Tensor",
        x: "Tensor",
        weight: "Tensor",
        bias: "Tensor | None" = None,
    ) -> None:
        """residual += x @ weight.T + bias."""
        ...


@frozen
class Ranks:
    """Those that share a model, each with its part of every divided matrix."""

    count: int = 1
    # Of each rank's part of a tensor, their sum; all call it in the same order.
    sum: "Callable[[Tensor], Tensor]" = lambda part: part


ALONE: Final = Ranks()


def norm_linear(x: "Tensor", norm: "Tensor", eps: float, linear: Linear) -> "Tensor":
    """The product with normalised rows: [tokens, inputs] -> [tokens, outputs]."""
    return _kernels(linear).norm_linear(x, norm, eps, linear.weight, linear.bias)


def norm_gated(
    x: "Tensor", norm: "Tensor", eps: float, linear: Linear, *, fused: bool
) -> "Tensor":
    """silu(gate) * up of gate and up, fused in `linear`: [tokens, inputs] -> [tokens,
    outputs / 2].

    `fused` is as in `minfer.kernels.linear.norm_gated`.
    """
    kernels = _kernels(linear)
    return kernels.norm_gated(x, norm, eps, linear.weight, linear.bias, fused=fused)


def add_product(residual: "Tensor", x: "Tensor", linear: Linear, ranks: Ranks) -> None:
    """Add a product to the residual stream [tokens, outputs], once it is whole.

    A rank that shares the model has some of the inputs, so its product is a part of each
    sum: the parts are summed over the ranks, then added. Alone, the product is added
    within the kernel.
    """
    kernels = _kernels(linear)
    if ranks.count == 1:
        kernels.linear_add(residual, x, linear.weight, linear.bias)
        return
    part = residual.new_zeros(residual.shape)
    kernels.linear_add(part, x, linear.weight, linear.bias)
    residual.add_(ranks.sum(part))


def _kernels(linear: Linear) -> Products:
    if linear.scheme is not Scheme.PLAIN:
        raise UnsupportedModelError(
            f"there are no kernels for {linear.scheme.value} matrices yet; use a "
            f"checkpoint in bfloat16, float16 or float32"
        )
    weight = linear.weight  # one that is nowhere stands for a GPU's
    return _on_gpu() if weight.is_cuda else _on_cpu()


@cache
def _on_cpu() -> Products:
    from minfer.kernels import plain

    return plain


@cache
def _on_gpu() -> Products:
    from minfer.kernels import linear  # Triton, which the CPU does without

    return linear
