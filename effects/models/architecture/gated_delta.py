"""A gated delta net, one of the recurrent types: sizes, weights, and its step.

Theory. Each head has a state, a matrix of keys by values, instead of the keys and values
of all tokens (Yang et al. 2025). A token first fades the state, then corrects what the
state gives for its key towards its own value, by the delta rule; its query reads the
result (kernels/gated_rule.py). How much is faded and corrected is computed from each
token. Before that, queries, keys and values go through a convolution over the last few
tokens, each channel by itself; after the rule, each head's result is normalised and
gated. Several value heads share one key head.

The state of a sequence is the same size whatever its length: of Qwen3-Next 32 heads of
128 x 128 numbers a layer, and the last 3 inputs of the convolution.

With tensor parallelism, heads are split: the products of the input by column, the one
after the heads by row.
"""

from collections.abc import Callable, Iterator
from functools import partial
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
from minfer.effects.models.families.recurrent_keys import GatedDeltaKeys
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.state_work import StateWork

NAME: Final = "linear_attn"  # in a layer of a checkpoint
# Added where queries and keys are divided by their lengths, whatever the config says.
L2_EPS: Final = 1e-6


@frozen(kw_only=True)
class GatedDelta:
    """Sizes of one layer's gated delta net, in elements."""

    hidden_size: int
    key_heads: int
    heads: int  # of values; each key head serves the same number of them
    key_dim: int
    value_dim: int
    width: int  # inputs of the convolution
    by_key_head: bool  # as in GatedDeltaKeys
    norms: NormRule

    def for_rank(self, rank_info: RankInfo) -> "GatedDelta":
        """Returns the sizes of one rank's heads. Raises `UnsupportedModelError`."""
        key_heads = rank_info.share(
            self.key_heads, "key heads of linear attention (linear_num_key_heads)"
        )
        heads = self.heads * key_heads // self.key_heads
        return evolve(self, key_heads=key_heads, heads=heads)

    @property
    def key_size(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.heads * self.value_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values, which go through the convolution."""
        return (self.key_size, self.key_size, self.value_size)

    # --- weights ------------------------------------------------------------------------

    @property
    def inputs(self) -> LinearSizes:
        """The product of queries, keys, values and output gates."""
        if self.by_key_head:
            return self._inputs(["in_proj_qkvz"], (*self.convolved, self.value_size))
        outputs = (sum(self.convolved), self.value_size)
        return self._inputs(["in_proj_qkv", "in_proj_z"], outputs)

    @property
    def state_gates(self) -> LinearSizes:
        """The product of two gates of each head: how much is corrected (beta), and how
        much is faded (decay). It has too few outputs for ranks to divide its quantized
        blocks.
        """
        names = ["in_proj_ba"] if self.by_key_head else ["in_proj_b", "in_proj_a"]
        return evolve(self._inputs(names, (self.heads, self.heads)), plain=True)

    def _inputs(self, names: list[str], outputs: tuple[int, ...]) -> LinearSizes:
        return LinearSizes(
            names=tuple(f"{NAME}.{name}" for name in names),
            outputs=outputs,
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the heads' results."""
        return LinearSizes(
            names=(f"{NAME}.out_proj",),
            outputs=(self.hidden_size,),
            inputs=self.value_size,
            shard=Shard.ROW,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.inputs, self.state_gates, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        matrices = sum(sizes.elements for sizes in self.matrices)
        norms = self.norms.elements(self.hidden_size) + self.value_dim
        return matrices + norms + self.width * sum(self.convolved) + 2 * self.heads

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return 2 * self.heads + self.norms.float32_elements(self.hidden_size)

    # --- memory -------------------------------------------------------------------------

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence."""
        heads = summed_state(self.heads, (self.key_dim, self.value_dim))
        return (conv_state(sum(self.convolved), self.width), heads)

    @property
    def pending_elements(self) -> int:
        """Elements that a token of a row with drafts takes until they are accepted."""
        return sum(self.inputs.outputs) + sum(self.state_gates.outputs)

    def activation_bytes(self, element: int) -> int:
        """Returns a token's bytes at its widest place, on a GPU or on the CPU, where the
        rule has its own float32 copies of each head's query, key and value; `element` is
        the bytes of an element of activations.
        """
        products = sum(self.inputs.outputs) + 2 * self.heads + sum(self.convolved)
        of_heads = self.heads * (2 * self.key_dim + 2 * self.value_dim + 3)
        return (products + self.value_size) * element + 4 * of_heads


@frozen(eq=False, kw_only=True)
class GatedDeltaWeights:
    """The weights of one layer's gated delta net."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    state_gates: Linear = field(metadata=PLAIN_LEAF)
    conv: "Tensor"  # [channels, width]
    step_bias: "Tensor"  # [heads] float32
    rates: "Tensor"  # [heads] float32: how fast a state fades
    out_norm: Norm  # [value_dim], of each head's result
    out: Linear


def read_gated_delta(
    reader: ConfigReader, keys: GatedDeltaKeys, norms: NormRule
) -> GatedDelta:
    """Returns the gated delta net of a model, from a config. Raises
    `ModelConfigError`.
    """
    key_heads = reader.size("linear_num_key_heads")
    heads = reader.size("linear_num_value_heads")
    if heads % key_heads:
        raise reader.error(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}"
        )
    return GatedDelta(
        hidden_size=reader.size("hidden_size"),
        key_heads=key_heads,
        heads=heads,
        key_dim=reader.size("linear_key_head_dim"),
        value_dim=reader.size("linear_value_head_dim"),
        width=reader.size("linear_conv_kernel_dim", low=2),
        by_key_head=keys.by_key_head,
        norms=norms,
    )


def empty_gated_delta(sizes: GatedDelta, make: WeightMaker) -> GatedDeltaWeights:
    """Returns uninitialised weights of these sizes."""
    before, _ = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return GatedDeltaWeights(
        norm=before,
        inputs=make.linear(sizes.inputs),
        state_gates=make.linear(sizes.state_gates),
        conv=make.tensor(sum(sizes.convolved), sizes.width),
        step_bias=make.vector(sizes.heads, "float32"),
        rates=make.vector(sizes.heads, "float32"),
        out_norm=Norm(make.vector(sizes.value_dim), sizes.norms.eps),
        out=make.linear(sizes.out),
    )


def gated_delta_parts(
    sizes: GatedDelta, weights: GatedDeltaWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from sublayer_norm_parts(weights.norm, None, sizes.norms)
    group = sizes.heads // sizes.key_heads
    value_group = group * sizes.value_dim
    kinds = (sizes.key_dim, sizes.key_dim, value_group, value_group)
    for part in weight_parts(sizes.inputs, weights.inputs, form):
        if sizes.by_key_head:
            yield evolve(part.rearranged(_by_kind(kinds)), pieces=())
        else:
            is_mixed = part.matrix == sizes.inputs.names[0]
            yield evolve(part, pieces=sizes.convolved if is_mixed else ())
    for part in weight_parts(sizes.state_gates, weights.state_gates, form):
        if sizes.by_key_head:
            part = evolve(part.rearranged(_by_kind((group, group))), pieces=())
        yield part
    yield from conv_parts(f"{NAME}.conv1d", weights.conv, pieces=sizes.convolved)
    yield WeightPart(f"{NAME}.dt_bias", weights.step_bias)
    yield WeightPart(f"{NAME}.A_log", weights.rates, exponentials)
    yield norm_part(f"{NAME}.norm", weights.out_norm, evolve(sizes.norms, offset=False))
    yield from weight_parts(sizes.out, weights.out, form)


def _by_kind(outputs: tuple[int, ...]) -> "Callable[[Tensor], Tensor]":
    """Returns a function that reorders the outputs of a stored matrix [outputs, ...]. In
    it the outputs of one key head follow those of another, and have `outputs[i]` of kind
    i; the result has all of the first kind, then all of the second, and so on.
    """

    def arrange(stored: "Tensor") -> "Tensor":
        import torch

        by_head = stored.reshape(-1, sum(outputs), *stored.shape[1:])
        kinds = by_head.split_with_sizes(outputs, 1)
        return torch.cat([of_kind.flatten(0, 1) for of_kind in kinds])

    return arrange


def mix_gated_delta(
    sizes: GatedDelta,
    weights: GatedDeltaWeights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the gated results of the heads of layer `index` [tokens, value_size], of
    rows [tokens, hidden], normalised if there is `norm`; updates the states.
    """
    from minfer.kernels.gated_norm import gated_norm

    mixed = norm_linear(rows, norm, weights.inputs, step.products)
    gates = norm_linear(rows, norm, weights.state_gates, step.products)
    update = partial(_update_states, sizes, weights)
    attended = step.update_states(index, update, mixed, gates)
    channels = sum(sizes.convolved)
    return gated_norm(
        attended.flatten(1), mixed[:, channels:], weights.out_norm, sizes.value_dim
    )


def _update_states(
    sizes: GatedDelta,
    weights: GatedDeltaWeights,
    state: LayerState,
    work: "StateWork",
    mixed: "Tensor",
    gates: "Tensor",
) -> "Tensor":
    """Returns the results of the heads [tokens, heads, value_dim]; updates states."""
    from minfer.kernels.gated_rule import gated_rule
    from minfer.kernels.rule_arguments import DecayGates
    from minfer.kernels.short_conv import short_conv

    channels = sum(sizes.convolved)
    convolved = short_conv(
        mixed[:, :channels], weights.conv, None, "silu", state.part(CONVOLUTION), work
    )
    q, k, v = convolved.split_with_sizes(sizes.convolved, 1)
    return gated_rule(
        q.view(len(q), sizes.key_heads, sizes.key_dim),
        k.view(len(q), sizes.key_heads, sizes.key_dim),
        v.view(len(q), sizes.heads, sizes.value_dim),
        DecayGates(gates[:, sizes.heads :], weights.step_bias, weights.rates),
        gates[:, : sizes.heads],
        state.part(STATE),
        work,
        l2_eps=L2_EPS,
        scale=sizes.key_dim**-0.5,
    )
