"""The dense feed-forward, one of the feed-forward types: sizes, weights, and its step.

Theory. activation(gate) * up, then down (Shazeer 2020): gate and up come from one fused
product, with the activation inside where that is faster. Older models have no gate:
activation(up), then down. With tensor parallelism, the first is split by column, the
second by row.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    bias_parts,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import feed
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import FeedForward
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import UNGATED, Activation, Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Dense:
    """Sizes of one layer's feed-forward, in elements."""

    hidden_size: int
    intermediate_size: int
    norms: NormRule
    bias: bool = False
    activation: Activation = "silu"
    name: str = "mlp"  # in a layer of a checkpoint
    # The name of gate and up in a checkpoint that stores them as one.
    stored_gate_up: str = ""
    down_name: str = "down_proj"
    # Of a token's gates, only what is above their mean plus so many standard deviations
    # counts (gaussian_topk.py); None: all of each.
    cutoff: float | None = None
    # What gates are multiplied with before the activation, and the result (Falcon-H1).
    gate_factor: float = 1.0
    result_factor: float = 1.0

    def for_rank(self, rank_info: RankInfo) -> "Dense":
        """Returns the sizes of one rank's channels. Raises `UnsupportedModelError`."""
        inter = rank_info.share(self.intermediate_size, f"channels of {self.name}")
        return evolve(self, intermediate_size=inter)

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.activation not in UNGATED

    @property
    def gate_up(self) -> LinearSizes:
        """The gate, if there is one, and what it multiplies."""
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        if self.stored_gate_up:
            names = (self.stored_gate_up,)
        return LinearSizes(
            names=tuple(f"{self.name}.{name}" for name in names),
            outputs=(self.intermediate_size,) * (1 + self.gated),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.bias,
            factors=self._gate_up_factors,
            bias_factors=self._gate_up_factors,
        )

    @property
    def _gate_up_factors(self) -> tuple[float, ...] | None:
        return None if self.gate_factor == 1 else (self.gate_factor, 1.0)

    @property
    def down(self) -> LinearSizes:
        """Back to the residual stream."""
        return LinearSizes(
            names=(f"{self.name}.{self.down_name}",),
            outputs=(self.hidden_size,),
            inputs=self.intermediate_size,
            shard=Shard.ROW,
            bias=self.bias,
            factors=(self.result_factor,),
            bias_factors=(self.result_factor,),
        )

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix of a checkpoint."""
        return self.hidden_size * self.intermediate_size

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.gate_up, self.down)

    @property
    def parameters(self) -> int:
        """Elements of all weights, the norms included."""
        norms = self.norms.elements(self.hidden_size)
        return self.gate_up.elements + self.down.elements + norms

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.norms.float32_elements(self.hidden_size)

    @property
    def active_parameters(self) -> int:
        """Elements that a token is multiplied with."""
        return self.parameters

    @property
    def activation_elements(self) -> int:
        """Elements that a token keeps at the feed-forward's widest place."""
        return (2 + self.gated) * self.intermediate_size


@frozen(eq=False, kw_only=True)
class DenseWeights:
    """The weights of one layer's feed-forward."""

    norm: Norm | None  # [hidden], of the input
    gate_up: Linear
    down: Linear
    after: Norm | None = None  # [hidden], of the result


def read_dense(reader: ConfigReader, family: Family, norms: NormRule) -> Dense:
    """Returns the dense feed-forward of a model, from a config. Raises
    `ModelConfigError`.
    """
    hidden = reader.size("hidden_size")
    gate_factor, result_factor = reader.factors(family.multipliers.feed_forward, 2)
    return Dense(
        hidden_size=hidden,
        intermediate_size=_read_width(reader, family.feed_forward, hidden),
        norms=norms,
        bias=reader.is_set(family.biases.mlp),
        activation=family.activation,
        stored_gate_up=family.stored.gate_up,
        down_name=family.stored.down,
        name=family.stored.feed_forward,
        gate_factor=gate_factor,
        result_factor=result_factor,
    )


def read_dense_layers(
    reader: ConfigReader, family: Family, norms: NormRule, layers: int
) -> list[Dense]:
    """Returns the dense feed-forward of each layer, whose widths a config may list.
    Raises `ModelConfigError`.
    """
    key = family.feed_forward.width
    widths = reader.config.get(key)
    if not family.feed_forward.by_layer or not isinstance(widths, list):
        return [read_dense(reader, family, norms)] * layers
    if len(widths) != layers:
        raise reader.error(key, f"a width, or a list of num_hidden_layers = {layers}")
    each = (
        ConfigReader({**reader.config, key: width}, reader.source, reader.own_names)
        for width in widths
    )
    return [read_dense(of_layer, family, norms) for of_layer in each]


def _read_width(reader: ConfigReader, keys: FeedForward, hidden: int) -> int:
    """Returns the width of dense feed-forwards."""
    first = keys.first_width and not reader.is_absent(keys.first_width)
    key = keys.first_width if first else keys.width
    width = reader.size(key, keys.default_ratio * hidden or None)
    if not keys.adjusted or not reader.flag(keys.adjusted):
        return width
    width = int(2 * width / 3)
    width = int(reader.positive("block_ffn_dim_multiplier") * width)
    multiple = reader.size("block_multiple_of")
    return -(-width // multiple) * multiple


def empty_dense(sizes: Dense, make: WeightMaker) -> DenseWeights:
    """Returns uninitialised weights of these sizes."""
    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return DenseWeights(
        norm=before,
        gate_up=make.linear(sizes.gate_up),
        down=make.linear(sizes.down),
        after=after,
    )


def dense_parts(
    sizes: Dense, weights: DenseWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from sublayer_norm_parts(weights.norm, weights.after, sizes.norms)
    yield from dense_matrix_parts(sizes, weights.gate_up, weights.down, form)


def dense_matrix_parts(
    sizes: Dense, gate_up: Linear, down: Linear, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors without the norms."""
    yield from weight_parts(sizes.gate_up, gate_up, form)
    yield from weight_parts(sizes.down, down, form)
    yield from bias_parts(sizes.gate_up, gate_up)
    yield from bias_parts(sizes.down, down)


def feed_dense(
    sizes: Dense,
    weights: DenseWeights,
    hidden: "Tensor",
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it, or that of normalised rows
    `x`.
    """
    feed(
        hidden,
        weights.norm,
        weights.gate_up,
        weights.down,
        sizes.activation,
        step.products,
        step.communicator,
        weights.after,
        x,
    )
