"""A learned part of the residual stream beside attention (LAuReL, Menghani et al. 2024):
sizes, weights, step.

Theory. Beside a sublayer, the rows that it reads go through a product of two narrow
matrices, hidden to rank to hidden, which is normalised and added to them: a cheap linear
path around attention. In Gemma 3n the sum of the stream, of attention's result and of
this is divided by the root of 2, as it is one of two sums of about the same size. The
matrices are small, and dequantized if a checkpoint has them quantized; each rank has all
of them.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    norm_part,
    weight_parts,
)
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import linear, normalise
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

NORM = "laurel.post_laurel_norm"


@frozen
class Laurel:
    """Sizes of one layer's LAuReL, in elements."""

    hidden_size: int
    rank: int
    norms: NormRule

    @property
    def left(self) -> LinearSizes:
        """From the rows to the rank."""
        return LinearSizes(
            ("laurel.linear_left",),
            (self.rank,),
            self.hidden_size,
            Shard.NONE,
            plain=True,
        )

    @property
    def right(self) -> LinearSizes:
        """And back."""
        return LinearSizes(
            ("laurel.linear_right",),
            (self.hidden_size,),
            self.rank,
            Shard.NONE,
            plain=True,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.left, self.right)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.left.elements + self.right.elements + self.hidden_size

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.hidden_size * self.norms.wide


@frozen(eq=False)
class LaurelWeights:
    """The weights of one layer's LAuReL."""

    left: Linear
    right: Linear
    norm: Norm  # [hidden]


def empty_laurel(sizes: Laurel, make: WeightMaker) -> LaurelWeights:
    """Returns uninitialised weights of these sizes."""
    return LaurelWeights(
        make.linear(sizes.left),
        make.linear(sizes.right),
        make.norm(sizes.hidden_size, sizes.norms),
    )


def laurel_parts(
    sizes: Laurel, weights: LaurelWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from weight_parts(sizes.left, weights.left, form)
    yield from weight_parts(sizes.right, weights.right, form)
    yield norm_part(NORM, weights.norm, sizes.norms)


def laurel_rows(
    weights: LaurelWeights, x: "Tensor", products: ProductContext
) -> "Tensor":
    """Returns what is added to the residual stream, of the rows that attention reads:
    [tokens, hidden] each.
    """
    low = linear(x, weights.left, products)
    return normalise(linear(low, weights.right, products), weights.norm).add_(x)


def add_laurel(hidden: "Tensor", rows: "Tensor") -> None:
    """Add these rows to a residual stream that has attention's result."""
    hidden.add_(rows).div_(math.sqrt(2))
