"""The dense feed-forward, one of the feed-forward types: sizes, weights, and its step.

Theory. silu(gate) * up, then down (Shazeer 2020): gate and up come from one fused
product, with the activation inside where that is faster. With tensor parallelism, the
first is split by column, the second by row.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families import Family
from minfer.effects.models.linear import (
    Linear,
    LinearSizes,
    Maker,
    Shard,
    bias_parts,
    weight_parts,
)
from minfer.effects.models.products import Ranks, add_product, norm_gated

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Dense:
    """Sizes of one layer's feed-forward, in elements."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False

    @property
    def gate_up(self) -> LinearSizes:
        """The gate, and what it multiplies."""
        return LinearSizes(
            names=("mlp.gate_proj", "mlp.up_proj"),
            outputs=(self.intermediate_size, self.intermediate_size),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.bias,
        )

    @property
    def down(self) -> LinearSizes:
        """Back to the residual stream."""
        return LinearSizes(
            names=("mlp.down_proj",),
            outputs=(self.hidden_size,),
            inputs=self.intermediate_size,
            shard=Shard.ROW,
            bias=self.bias,
        )

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices."""
        return self.gate_up.matrix_elements + self.down.matrix_elements

    @property
    def parameters(self) -> int:
        """Elements of all weights, the norm included."""
        return self.gate_up.elements + self.down.elements + self.hidden_size

    @property
    def activation_elements(self) -> int:
        """Elements that a token keeps at the feed-forward's widest place."""
        return 3 * self.intermediate_size


@frozen(eq=False, kw_only=True)
class DenseWeights:
    """The weights of one layer's feed-forward."""

    norm: "Tensor"  # [hidden], of the input
    gate_up: Linear
    down: Linear


def read_dense(read: ConfigReader, family: Family) -> Dense:
    """Returns the feed-forward of every layer, from a config. Raises
    `ModelConfigError`.
    """
    return Dense(
        hidden_size=read.size("hidden_size"),
        intermediate_size=read.size("intermediate_size"),
        bias="mlp_bias" in family.bias_flags and read.flag("mlp_bias"),
    )


def empty_dense(sizes: Dense, make: Maker) -> DenseWeights:
    """Returns uninitialised weights of these sizes."""
    return DenseWeights(
        norm=make.vector(sizes.hidden_size),
        gate_up=make.linear(sizes.gate_up),
        down=make.linear(sizes.down),
    )


def dense_parts(sizes: Dense, weights: DenseWeights) -> "Iterator[tuple[str, Tensor]]":
    """Yields each tensor's name in a layer of a checkpoint, and its place: a view."""
    yield "post_attention_layernorm.weight", weights.norm
    yield from weight_parts(sizes.gate_up, weights.gate_up)
    yield from weight_parts(sizes.down, weights.down)
    yield from bias_parts(sizes.gate_up, weights.gate_up)
    yield from bias_parts(sizes.down, weights.down)


def feed_dense(
    weights: DenseWeights, hidden: "Tensor", eps: float, ranks: Ranks, *, fused: bool
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it."""
    inner = norm_gated(hidden, weights.norm, eps, weights.gate_up, fused=fused)
    add_product(hidden, inner, weights.down, ranks)
