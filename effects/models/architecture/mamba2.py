"""Mamba 2, one of the recurrent types: sizes, weights, and its step.

Theory. Each head has a state, a matrix of state size by head dimensions (Dao and Gu
2024). A token fades it by exp(-rate * step), adds the product of its input with its
vector B, weighed by the step, and reads it with its vector C; heads of a group share B
and C. Steps are computed from each token. So B is a key, C a query, and the input a value
of linear attention (kernels/gated_rule.py). Before that, inputs, B and C go through a
convolution over the last few tokens; after the rule, results are gated and normalised, or
gated alone.

With tensor parallelism, heads are split, and groups with them. Of one group, all ranks
have the B and C; the norm over its results then needs a sum over the ranks.
"""

from collections.abc import Iterator
from functools import partial
from math import inf, nan
from typing import TYPE_CHECKING, Final, Literal

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
    norm_part,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import norm_linear
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.architecture.summed_state import (
    STATE,
    exponentials,
    summed_state,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.layer_keys import Multipliers
from minfer.effects.models.families.recurrent_keys import Mamba2Keys
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import Communicator, RankInfo
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.state_work import StateWork

AUTO: Final = "auto"  # a head's dimensions in configs that leave them to be derived
NUM_LIMITS: Final = 2  # of steps: the smallest and the largest
NUM_OUTPUTS: Final = 5  # of the first product: gates, inputs, B, C, steps
# The norm of results: of gated ones, of those before the gate, or none.
OutputNorm = Literal["gated", "before the gate", "none"]


@frozen(kw_only=True)
class Mamba2:
    """Sizes of one layer's Mamba 2, in elements."""

    hidden_size: int
    heads: int
    head_dim: int
    groups: int  # of heads, which share B and C
    state_size: int
    width: int  # inputs of the convolution
    name: str  # in a layer of a checkpoint
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    # The smallest and the largest step
    low: float = 0.0
    high: float = inf
    output_norm: OutputNorm
    norms: NormRule
    # What its input, the outputs of its first product, and its result are multiplied with
    # (Falcon-H1).
    input_factor: float = 1.0
    output_factors: tuple[float, ...] = (1.0,) * NUM_OUTPUTS
    result_factor: float = 1.0
    # Whether ranks share the only group, each with some of its heads.
    divides_group: bool = False

    def for_rank(self, rank_info: RankInfo) -> "Mamba2":
        """Returns the sizes of one rank's heads. Raises `UnsupportedModelError`."""
        heads = rank_info.share(self.heads, f"heads of {self.name}")
        if self.groups == 1:
            is_divided = not rank_info.has_whole_matrices
            return evolve(self, heads=heads, divides_group=is_divided)
        groups = rank_info.share(self.groups, f"groups of heads of {self.name}")
        return evolve(self, heads=heads, groups=groups)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Widths of inputs, B and C, which go through the convolution."""
        of_groups = self.groups * self.state_size
        return (self.inner_size, of_groups, of_groups)

    # --- weights ------------------------------------------------------------------------

    @property
    def inputs(self) -> LinearSizes:
        """The product of gates, inputs, B, C and steps."""
        return LinearSizes(
            names=(f"{self.name}.in_proj",),
            outputs=(self.inner_size, *self.convolved, self.heads),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.in_bias,
            factors=tuple(self.input_factor * factor for factor in self.output_factors),
            bias_factors=self.output_factors,
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the heads' results."""
        return LinearSizes(
            names=(f"{self.name}.out_proj",),
            outputs=(self.hidden_size,),
            inputs=self.inner_size,
            shard=Shard.ROW,
            bias=self.out_bias,
            factors=(self.result_factor,),
            bias_factors=(self.result_factor,),
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.inputs, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        matrices = sum(sizes.elements for sizes in self.matrices)
        norms = self.norms.elements(self.hidden_size)
        norms += self.inner_size * (self.output_norm != "none")
        convolution = (self.width + self.conv_bias) * sum(self.convolved)
        return matrices + norms + convolution + 3 * self.heads

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return 3 * self.heads + self.norms.float32_elements(self.hidden_size)

    # --- memory -------------------------------------------------------------------------

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence."""
        heads = summed_state(self.heads, (self.state_size, self.head_dim))
        return (conv_state(sum(self.convolved), self.width), heads)

    @property
    def pending_elements(self) -> int:
        """Elements that a token of a row with drafts takes until they are accepted."""
        return sum(self.inputs.outputs)

    def activation_bytes(self, element: int) -> int:
        """Returns a token's bytes at its widest place, on a GPU or on the CPU, where the
        rule has its own float32 copies of each head's B, C and input; `element` is the
        bytes of an element of activations.
        """
        products = sum(self.inputs.outputs) + sum(self.convolved) + self.inner_size
        of_heads = self.heads * (2 * self.state_size + 2 * self.head_dim + 3)
        return products * element + 4 * of_heads


@frozen(eq=False, kw_only=True)
class Mamba2Weights:
    """The weights of one layer's Mamba 2."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    conv: "Tensor"  # [channels, width]
    conv_bias: "Tensor | None"  # [channels]
    step_bias: "Tensor"  # [heads] float32
    rates: "Tensor"  # [heads] float32: how fast a state fades
    skip: "Tensor"  # [heads] float32: what results get of inputs as they are
    out_norm: Norm | None  # [inner]
    out: Linear


def read_mamba2(
    reader: ConfigReader, keys: Mamba2Keys, norms: NormRule, multipliers: Multipliers
) -> Mamba2:
    """Returns the Mamba 2 of a model, from a config. Raises `ModelConfigError`."""
    hidden, heads = reader.size("hidden_size"), reader.size(keys.heads)
    head_dim = _read_head_dim(reader, keys, heads)
    groups = reader.size(keys.groups)
    if heads % groups:
        raise reader.error(keys.groups, f"a divisor of {keys.heads} = {heads}")
    low, high = _read_limits(reader, keys)
    (input_factor,) = reader.factors(multipliers.recurrent_input)
    (result_factor,) = reader.factors(multipliers.recurrent_result)
    return Mamba2(
        hidden_size=hidden,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=reader.size(keys.state_size),
        width=reader.size(keys.width, low=2),
        name=keys.name,
        conv_bias=reader.is_set(keys.conv_bias),
        in_bias=reader.is_set(keys.in_bias),
        out_bias=reader.is_set(keys.out_bias),
        low=low,
        high=high,
        output_norm=_read_output_norm(reader, keys),
        norms=norms,
        input_factor=input_factor,
        output_factors=reader.factors(multipliers.recurrent_outputs, NUM_OUTPUTS),
        result_factor=result_factor,
    )


def _read_output_norm(reader: ConfigReader, keys: Mamba2Keys) -> OutputNorm:
    """Returns where results are normalised."""
    if not reader.is_set(keys.out_norm):
        return "none"
    return "before the gate" if reader.is_set(keys.norm_first) else "gated"


def _read_head_dim(reader: ConfigReader, keys: Mamba2Keys, heads: int) -> int:
    """Returns the dimensions of a head, which a config may leave to be derived. Raises
    `ModelConfigError` where all heads are not as wide as the config says.
    """
    if not keys.expand:
        return reader.size(keys.head_dim)
    inner = reader.size(keys.expand) * reader.size("hidden_size")
    if keys.inner:
        inner = reader.size(keys.inner, inner)
    if reader.config.get(keys.head_dim) == AUTO and inner % heads == 0:
        return inner // heads
    if reader.size(keys.head_dim) * heads != inner:
        names = [keys.inner] if keys.inner else []
        names.append(f"{keys.expand} times hidden_size")
        raise reader.error(
            keys.head_dim,
            f"'{AUTO}', or such that {keys.heads} = {heads} heads have {inner} "
            f"dimensions ({' or '.join(names)})",
        )
    return reader.size(keys.head_dim)


def _read_limits(reader: ConfigReader, keys: Mamba2Keys) -> tuple[float, float]:
    """Returns the smallest and the largest step."""
    if keys.low:
        return reader.positive(keys.low), inf
    if reader.is_absent(keys.limits):
        return 0.0, inf
    listed = reader.config[keys.limits]
    limits = [*map(_as_number, listed)] if isinstance(listed, list | tuple) else []
    if len(limits) != NUM_LIMITS or not 0 <= limits[0] <= limits[1]:
        raise reader.error(keys.limits, "a list of the smallest and the largest step")
    return limits[0], limits[1]


def _as_number(value: object) -> float:
    """Returns a number of a config, in which transformers writes {"__float__":
    "Infinity"}; NaN for anything else.
    """
    if value == {"__float__": "Infinity"}:
        return inf
    return float(value) if isinstance(value, int | float) else nan


def empty_mamba2(sizes: Mamba2, make: WeightMaker) -> Mamba2Weights:
    """Returns uninitialised weights of these sizes."""
    before, _ = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    channels, out_norm = sum(sizes.convolved), None
    if sizes.output_norm != "none":
        out_norm = Norm(make.vector(sizes.inner_size), sizes.norms.eps)
    return Mamba2Weights(
        norm=before,
        inputs=make.linear(sizes.inputs),
        conv=make.tensor(channels, sizes.width),
        conv_bias=make.vector(channels) if sizes.conv_bias else None,
        step_bias=make.vector(sizes.heads, "float32"),
        rates=make.vector(sizes.heads, "float32"),
        skip=make.vector(sizes.heads, "float32"),
        out_norm=out_norm,
        out=make.linear(sizes.out),
    )


def mamba2_parts(
    sizes: Mamba2, weights: Mamba2Weights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    name = sizes.name
    yield from sublayer_norm_parts(weights.norm, None, sizes.norms)
    yield from weight_parts(sizes.inputs, weights.inputs, form)
    yield from bias_parts(sizes.inputs, weights.inputs)
    yield from conv_parts(
        f"{name}.conv1d", weights.conv, weights.conv_bias, sizes.convolved
    )
    yield WeightPart(f"{name}.dt_bias", weights.step_bias)
    yield WeightPart(f"{name}.A_log", weights.rates, exponentials)
    yield WeightPart(f"{name}.D", weights.skip)
    if weights.out_norm is not None:
        rule = evolve(sizes.norms, offset=False)
        yield norm_part(f"{name}.norm", weights.out_norm, rule)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def mix_mamba2(
    sizes: Mamba2,
    weights: Mamba2Weights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the gated results of the heads of layer `index` [tokens, inner_size], of
    rows [tokens, hidden], normalised if there is `norm`; updates the states.
    """
    projected = norm_linear(rows, norm, weights.inputs, step.products)
    widths = (sizes.inner_size, sum(sizes.convolved), sizes.heads)
    gates, mixed, steps = projected.split_with_sizes(widths, 1)
    update = partial(_update_states, sizes, weights)
    results = step.update_states(index, update, mixed, steps)
    return _gated(sizes, weights, results.flatten(1), gates, step.communicator)


def _update_states(
    sizes: Mamba2,
    weights: Mamba2Weights,
    state: LayerState,
    work: "StateWork",
    mixed: "Tensor",
    steps: "Tensor",
) -> "Tensor":
    """Returns the results of the heads [tokens, heads, head_dim]; updates states."""
    from minfer.kernels.gated_rule import gated_rule
    from minfer.kernels.rule_arguments import DecayGates
    from minfer.kernels.short_conv import short_conv

    convolved = short_conv(
        mixed, weights.conv, weights.conv_bias, "silu", state.part(CONVOLUTION), work
    )
    x, b, c = convolved.split_with_sizes(sizes.convolved, 1)
    return gated_rule(
        c.view(len(c), sizes.groups, sizes.state_size),
        b.view(len(b), sizes.groups, sizes.state_size),
        x.view(len(x), sizes.heads, sizes.head_dim),
        DecayGates(steps, weights.step_bias, weights.rates, sizes.low, sizes.high),
        None,
        state.part(STATE),
        work,
        skip=weights.skip,
    )


def _gated(
    sizes: Mamba2,
    weights: Mamba2Weights,
    results: "Tensor",
    gates: "Tensor",
    communicator: Communicator,
) -> "Tensor":
    """Returns results [tokens, inner_size] with their gates, normalised if they are."""
    from minfer.kernels.gated_norm import gated_norm

    if weights.out_norm is None:
        import torch.nn.functional as F

        return results.mul_(F.silu(gates))
    if sizes.divides_group:
        return _normalised_over_ranks(
            sizes, weights.out_norm, results, gates, communicator
        )
    group = sizes.inner_size // sizes.groups
    gate_first = sizes.output_norm == "gated"
    return gated_norm(results, gates, weights.out_norm, group, gate_first=gate_first)


def _normalised_over_ranks(
    sizes: Mamba2,
    norm: Norm,
    results: "Tensor",
    gates: "Tensor",
    communicator: Communicator,
) -> "Tensor":
    """Returns results of a part of the heads, normalised over the heads of all ranks."""
    import torch.nn.functional as F

    wide, factors = results.float(), F.silu(gates.float())
    if sizes.output_norm == "gated":
        wide = wide * factors
    squares = communicator.sum(wide.square().sum(-1, keepdim=True))
    size = sizes.inner_size * communicator.rank_info.parallel.tensor
    normalised = wide * (squares / size + norm.eps).rsqrt() * norm.weight.float()
    if sizes.output_norm != "gated":
        normalised = normalised * factors
    return normalised.to(results.dtype)
