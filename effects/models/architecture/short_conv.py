"""A gated short convolution, one of the recurrent types: sizes, weights, and its step.

Theory. A token's channels, gated, go through a convolution over the last few tokens, each
channel by itself, and are gated again (LFM2, Liquid AI 2025). Its state is the last
inputs of the convolution: with a kernel of 3, two inputs of each channel.

With tensor parallelism, channels are split: the product of the input by column, the one
after the convolution by row.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.cache import LayerState
from minfer.effects.models.architecture.conv_state import (
    CONVOLUTION,
    conv_parts,
    conv_state,
)
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    bias_parts,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import norm_linear
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.state_work import StateWork

NAME: Final = "conv"  # in a layer of a checkpoint


@frozen(kw_only=True)
class ShortConv:
    """Sizes of one layer's short convolution, in elements."""

    hidden_size: int
    channels: int
    width: int  # inputs of the convolution
    bias: bool  # of its products, and of the convolution
    norms: NormRule

    def for_rank(self, rank_info: RankInfo) -> "ShortConv":
        """Returns the sizes of one rank's channels. Raises `UnsupportedModelError`."""
        channels = rank_info.share(self.channels, f"channels of {NAME}")
        return evolve(self, channels=channels)

    @property
    def inputs(self) -> LinearSizes:
        """The product of gates of inputs, gates of results, and inputs."""
        return LinearSizes(
            names=(f"{NAME}.in_proj",),
            outputs=(self.channels,) * 3,
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.bias,
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the channels."""
        return LinearSizes(
            names=(f"{NAME}.out_proj",),
            outputs=(self.hidden_size,),
            inputs=self.channels,
            shard=Shard.ROW,
            bias=self.bias,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.inputs, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        matrices = sum(sizes.elements for sizes in self.matrices)
        convolution = (self.width + self.bias) * self.channels
        return matrices + convolution + self.norms.elements(self.hidden_size)

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.norms.float32_elements(self.hidden_size)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence."""
        return (conv_state(self.channels, self.width),)

    @property
    def pending_elements(self) -> int:
        """Elements that a token of a row with drafts takes until they are accepted."""
        return self.channels

    def activation_bytes(self, element: int) -> int:
        """Returns a token's bytes at its widest place, on a GPU or on the CPU, where the
        convolution has its own float32 copies; `element` is the bytes of an element of
        activations.
        """
        return (3 + 3) * self.channels * element + 3 * 4 * self.channels


@frozen(eq=False, kw_only=True)
class ShortConvWeights:
    """The weights of one layer's short convolution."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    conv: "Tensor"  # [channels, width]
    conv_bias: "Tensor | None"  # [channels]
    out: Linear


def read_short_conv(reader: ConfigReader, norms: NormRule) -> ShortConv:
    """Returns the short convolution of a model, from a config. Raises
    `ModelConfigError`.
    """
    hidden = reader.size("hidden_size")
    return ShortConv(
        hidden_size=hidden,
        channels=hidden,
        width=reader.size("conv_L_cache", low=2),
        bias=reader.flag("conv_bias"),
        norms=norms,
    )


def empty_short_conv(sizes: ShortConv, make: WeightMaker) -> ShortConvWeights:
    """Returns uninitialised weights of these sizes."""
    before, _ = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return ShortConvWeights(
        norm=before,
        inputs=make.linear(sizes.inputs),
        conv=make.tensor(sizes.channels, sizes.width),
        conv_bias=make.vector(sizes.channels) if sizes.bias else None,
        out=make.linear(sizes.out),
    )


def short_conv_parts(
    sizes: ShortConv, weights: ShortConvWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from sublayer_norm_parts(weights.norm, None, sizes.norms)
    yield from weight_parts(sizes.inputs, weights.inputs, form)
    yield from bias_parts(sizes.inputs, weights.inputs)
    yield from conv_parts(f"{NAME}.conv", weights.conv, weights.conv_bias)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def mix_short_conv(
    weights: ShortConvWeights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the gated results of the convolution of layer `index` [tokens, channels],
    of rows [tokens, hidden], normalised if there is `norm`; updates the states.
    """
    product = norm_linear(rows, norm, weights.inputs, step.products)
    of_inputs, of_results, x = product.chunk(3, -1)
    update = partial(_update_states, weights)
    return step.update_states(index, update, of_inputs * x).mul_(of_results)


def _update_states(
    weights: ShortConvWeights, state: LayerState, work: "StateWork", x: "Tensor"
) -> "Tensor":
    """Returns the convolved `x` [tokens, channels]; updates states."""
    from minfer.kernels.short_conv import short_conv

    units = state.part(CONVOLUTION)
    return short_conv(x, weights.conv, weights.conv_bias, None, units, work)
