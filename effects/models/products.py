"""Chooses the kernel of a product with a `Linear`: by its scheme and device.

A model needs only three products: one with the norm before it inside, one with the gate
after it inside, and one whose result is added to the residual stream. Kernels decide what
they fuse with them; a scheme without a kernel is refused by name.

torch is imported with the first product: sizes of models are read without it.
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
    """The products of a module of kernels with plain matrices; see
    `minfer.kernels.plain`.
    """

    def norm_linear(
        self,
        x: "Tensor",
        norm_weight: "Tensor",
        eps: float,
        weight: "Tensor",
        bias: "Tensor | None" = None,
    ) -> "Tensor":
        """Returns rms_norm(x) @ weight.T + bias."""
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
        """Returns silu(gate) * up of [gate, up] = rms_norm(x) @ gate_up.T + bias."""
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
    """The ranks that share a model, each with its part of every split matrix."""

    count: int = 1
    # Sums the ranks' parts of a tensor; all ranks call it in the same order.
    sum: "Callable[[Tensor], Tensor]" = lambda part: part


ALONE: Final = Ranks()


def norm_linear(x: "Tensor", norm: "Tensor", eps: float, linear: Linear) -> "Tensor":
    """Returns the product with normalised rows: [tokens, inputs] -> [tokens, outputs]."""
    return _kernels(linear).norm_linear(x, norm, eps, linear.weight, linear.bias)


def norm_gated(
    x: "Tensor", norm: "Tensor", eps: float, linear: Linear, *, fused: bool
) -> "Tensor":
    """Returns silu(gate) * up of gate and up, fused in `linear`: [tokens, inputs] ->
    [tokens, outputs / 2].

    `fused` is as in `minfer.kernels.fused_linear.norm_gated`.
    """
    kernels = _kernels(linear)
    return kernels.norm_gated(x, norm, eps, linear.weight, linear.bias, fused=fused)


def add_product(residual: "Tensor", x: "Tensor", linear: Linear, ranks: Ranks) -> None:
    """Add a product to the residual stream [tokens, outputs], summed over the ranks.

    A rank has some of the inputs, so its product is a part of each sum: the parts are
    summed over the ranks, then added. With one rank, the kernel adds the product.
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
    weight = linear.weight
    return _on_gpu() if weight.is_cuda else _on_cpu()


@cache
def _on_cpu() -> Products:
    from minfer.kernels import plain

    return plain


@cache
def _on_gpu() -> Products:
    from minfer.kernels import (
        fused_linear as linear,  # imports Triton, which the CPU does not need
    )

    return linear
