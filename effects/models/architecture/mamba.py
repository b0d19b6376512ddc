"""Mamba, the first one, one of the recurrent types: sizes, weights, and its step.

Theory. Each channel has a state of a few numbers (Gu and Dao 2023). A token fades each of
them at a rate of its own, exp(-rate * step), adds its input times its B and the step, and
reads them with its C; all channels share B and C (kernels/selective_scan.py). Steps, B
and C are products of what a convolution over the last few tokens returns; steps go
through a small rank. Jamba normalises all three. The results are gated.

Mamba 2 (mamba2.py) has one rate for all of a head, so that chunks are products of
matrices. Here they are not.

With tensor parallelism, channels are split. Steps, B and C are of all channels, so their
product is summed over the ranks, as the last one is. It and the product of steps stay
unquantized: together they are a twentieth of the layer, and decays are exponentials of
their results.
"""

from collections.abc import Iterator
from functools import partial
from math import ceil, gcd
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from minfer.effects.models.architecture.cache import LayerState
from minfer.effects.models.architecture.conv_state import (
    CONVOLUTION,
    conv_parts,
    conv_state,
)
from minfer.effects.models.architecture.linear import (
    PLAIN_LEAF,
    LinearSizes,
    NormRule,
    WeightMaker,
    bias_parts,
    norm_part,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.mamba2 import AUTO
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import linear, norm_linear, normalise
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.architecture.summed_state import (
    STATE,
    exponentials,
    summed_state,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.state_work import StateWork

NAME: Final = "mamba"  # in a layer of a checkpoint
UNIT_CHANNELS: Final = 32  # of a unit of the state, at most: a line of memory in float32
AUTO_RANK: Final = 16  # what the hidden size is divided by, if the rank is "auto"


@frozen(kw_only=True)
class Mamba:
    """Sizes of one layer's Mamba, in elements."""

    hidden_size: int
    channels: int
    state_size: int  # of a channel
    step_rank: int
    width: int  # inputs of the convolution
    conv_bias: bool
    bias: bool  # of the first and the last product
    norms: NormRule

    def for_rank(self, rank_info: RankInfo) -> "Mamba":
        """Returns the sizes of one rank's channels. Raises `UnsupportedModelError`."""
        return evolve(
            self, channels=rank_info.share(self.channels, f"channels of {NAME}")
        )

    # --- weights ------------------------------------------------------------------------

    @property
    def inputs(self) -> LinearSizes:
        """The product of inputs and gates."""
        return LinearSizes(
            names=(f"{NAME}.in_proj",),
            outputs=(self.channels, self.channels),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.bias,
        )

    @property
    def selection(self) -> LinearSizes:
        """The product of B, C, and the low-rank inputs of steps."""
        return LinearSizes(
            names=(f"{NAME}.x_proj",),
            outputs=(self.step_rank, self.state_size, self.state_size),
            inputs=self.channels,
            shard=Shard.ROW,
            plain=True,
        )

    @property
    def steps(self) -> LinearSizes:
        """The product of steps; the scan adds its bias."""
        return LinearSizes(
            names=(f"{NAME}.dt_proj",),
            outputs=(self.channels,),
            inputs=self.step_rank,
            shard=Shard.COLUMN,
            plain=True,
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
        return (self.inputs, self.selection, self.steps, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        matrices = sum(sizes.elements for sizes in self.matrices)
        norms = self.norms.elements(self.hidden_size) + sum(self.selection.outputs)
        convolution = (self.width + self.conv_bias) * self.channels
        return matrices + norms + convolution + self._scan_elements

    @property
    def _scan_elements(self) -> int:
        """Elements of rates, of biases of steps, and of `skip`."""
        return self.channels * (self.state_size + 2)

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self._scan_elements + self.norms.float32_elements(self.hidden_size)

    # --- memory -------------------------------------------------------------------------

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence."""
        of_unit = gcd(self.channels, UNIT_CHANNELS)
        shape = (self.state_size, of_unit)
        states = summed_state(self.channels // of_unit, shape)
        return (conv_state(self.channels, self.width), states)

    @property
    def pending_elements(self) -> int:
        """Elements that a token of a row with drafts takes until they are accepted."""
        of_convolution = 2 * self.channels  # its inputs, and the gates beside them
        of_scan = 3 * self.channels + 2 * self.state_size  # x, steps, gates; B, C
        return of_convolution + of_scan

    def activation_bytes(self, element: int) -> int:
        """Returns a token's bytes at its widest place, on a GPU or on the CPU, where the
        scan has its own float32 copies; `element` is the bytes of an element of
        activations.
        """
        products = 5 * self.channels + 2 * sum(self.selection.outputs)
        return products * element + 4 * (4 * self.channels + 2 * self.state_size)


@frozen(eq=False, kw_only=True)
class MambaWeights:
    """The weights of one layer's Mamba."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    conv: "Tensor"  # [channels, width]
    conv_bias: "Tensor | None"  # [channels]
    selection: Linear = field(metadata=PLAIN_LEAF)
    step_norm: Norm  # [step_rank]
    b_norm: Norm  # [state_size]
    c_norm: Norm  # [state_size]
    steps: Linear = field(metadata=PLAIN_LEAF)
    step_bias: "Tensor"  # [channels] float32
    rates: "Tensor"  # [channels, state_size] float32: how fast a state fades
    skip: "Tensor"  # [channels] float32: what results get of inputs as they are
    out: Linear


def read_mamba(reader: ConfigReader, norms: NormRule) -> Mamba:
    """Returns the Mamba of a model, from a config. Raises `ModelConfigError`."""
    hidden, rank = reader.size("hidden_size"), "mamba_dt_rank"
    is_auto = reader.config.get(rank) == AUTO
    return Mamba(
        hidden_size=hidden,
        channels=reader.size("mamba_expand") * hidden,
        state_size=reader.size("mamba_d_state"),
        step_rank=ceil(hidden / AUTO_RANK) if is_auto else reader.size(rank),
        width=reader.size("mamba_d_conv", low=2),
        conv_bias=reader.flag("mamba_conv_bias"),
        bias=reader.flag("mamba_proj_bias"),
        norms=norms,
    )


def empty_mamba(sizes: Mamba, make: WeightMaker) -> MambaWeights:
    """Returns uninitialised weights of these sizes."""
    before, _ = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    channels = sizes.channels
    step_norm, b_norm, c_norm = (
        Norm(make.vector(size), sizes.norms.eps) for size in sizes.selection.outputs
    )
    return MambaWeights(
        norm=before,
        inputs=make.linear(sizes.inputs),
        conv=make.tensor(channels, sizes.width),
        conv_bias=make.vector(channels) if sizes.conv_bias else None,
        selection=make.linear(sizes.selection),
        step_norm=step_norm,
        b_norm=b_norm,
        c_norm=c_norm,
        steps=make.linear(sizes.steps),
        step_bias=make.vector(channels, "float32"),
        rates=make.tensor(channels, sizes.state_size, dtype="float32"),
        skip=make.vector(channels, "float32"),
        out=make.linear(sizes.out),
    )


def mamba_parts(
    sizes: Mamba, weights: MambaWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from sublayer_norm_parts(weights.norm, None, sizes.norms)
    yield from weight_parts(sizes.inputs, weights.inputs, form)
    yield from bias_parts(sizes.inputs, weights.inputs)
    yield from conv_parts(f"{NAME}.conv1d", weights.conv, weights.conv_bias)
    yield from weight_parts(sizes.selection, weights.selection, form)
    rule = evolve(sizes.norms, offset=False)
    yield norm_part(f"{NAME}.dt_layernorm", weights.step_norm, rule)
    yield norm_part(f"{NAME}.b_layernorm", weights.b_norm, rule)
    yield norm_part(f"{NAME}.c_layernorm", weights.c_norm, rule)
    yield from weight_parts(sizes.steps, weights.steps, form)
    yield WeightPart(f"{NAME}.dt_proj.bias", weights.step_bias)
    yield WeightPart(f"{NAME}.A_log", weights.rates, exponentials)
    yield WeightPart(f"{NAME}.D", weights.skip)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def mix_mamba(
    sizes: Mamba,
    weights: MambaWeights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the gated results of layer `index` [tokens, channels], of rows [tokens,
    hidden], normalised if there is `norm`; updates the states.
    """
    mixed = norm_linear(rows, norm, weights.inputs, step.products)
    x = step.update_states(index, partial(_convolve, sizes, weights), mixed)
    partial_sum = linear(x, weights.selection, step.products)
    selection = step.communicator.sum(partial_sum).split_with_sizes(
        sizes.selection.outputs, 1
    )
    ranks, b, c = (part.contiguous() for part in selection)
    return step.update_states(
        index,
        partial(_scan, weights),
        x,
        norm_linear(ranks, weights.step_norm, weights.steps, step.products),
        normalise(b, weights.b_norm),
        normalise(c, weights.c_norm),
        mixed[:, sizes.channels :],
    )


def _convolve(
    sizes: Mamba,
    weights: MambaWeights,
    state: LayerState,
    work: "StateWork",
    mixed: "Tensor",
) -> "Tensor":
    """Returns what the convolution makes of inputs [tokens, channels]; updates its
    states.
    """
    from minfer.kernels.short_conv import short_conv

    inputs, units = mixed[:, : sizes.channels], state.part(CONVOLUTION)
    return short_conv(inputs, weights.conv, weights.conv_bias, "silu", units, work)


def _scan(
    weights: MambaWeights,
    state: LayerState,
    work: "StateWork",
    x: "Tensor",
    steps: "Tensor",
    b: "Tensor",
    c: "Tensor",
    gates: "Tensor",
) -> "Tensor":
    """Returns the gated results of the scan [tokens, channels]; updates its states."""
    from minfer.kernels.scan_arguments import ScanWeights
    from minfer.kernels.selective_scan import selective_scan

    learned = ScanWeights(weights.step_bias, weights.rates, weights.skip)
    return selective_scan(x, steps, b, c, gates, learned, state.part(STATE), work)
