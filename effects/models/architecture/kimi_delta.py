"""Kimi delta attention, one of the recurrent types: sizes, weights, and its step.

Theory. It is a gated delta net (gated_delta.py) in which each channel of a key has a
decay of its own, so that a head forgets some of what it keeps and not the rest (Kimi Team
2025). A gate for each channel would need a large matrix, so the gates of decays and of
results are products with two small ones, of low rank: one head's dimensions. Queries,
keys and values are separate matrices with the same number of heads; each goes through a
convolution over the last few tokens. After the rule, each head's result is normalised
and multiplied with the sigmoid of its gate.

The state of a sequence is, in Kimi-Linear 48B, 32 heads of 128 x 128 numbers a layer, and
the last 3 inputs of 12,288 channels.

With tensor parallelism, heads are split; all ranks have the first matrices of the gates.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from minfer.effects.models.architecture.cache import LayerState
from minfer.effects.models.architecture.conv_state import (
    CONVOLUTION,
    conv_parts,
    conv_state,
)
from minfer.effects.models.architecture.gated_delta import L2_EPS
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
from minfer.effects.models.architecture.products import linear, norm_linear
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

NAME: Final = "self_attn"  # in a layer of a checkpoint
KINDS: Final = ("q", "k", "v")  # of what goes through convolutions


@frozen(kw_only=True)
class KimiDelta:
    """Sizes of one layer's Kimi delta attention, in elements."""

    hidden_size: int
    heads: int
    head_dim: int  # of queries, keys and values; the rank of gates, too
    width: int  # inputs of the convolutions
    norms: NormRule

    def for_rank(self, rank_info: RankInfo) -> "KimiDelta":
        """Returns the sizes of one rank's heads. Raises `UnsupportedModelError`."""
        label = "heads of linear attention (linear_num_heads)"
        return evolve(self, heads=rank_info.share(self.heads, label))

    @property
    def size(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together."""
        return len(KINDS) * self.size

    # --- weights ------------------------------------------------------------------------

    @property
    def inputs(self) -> LinearSizes:
        """The product of queries, keys and values."""
        names = [f"{kind}_proj" for kind in KINDS]
        return self._inputs(names, (self.size,) * len(KINDS), Shard.COLUMN)

    @property
    def strengths(self) -> LinearSizes:
        """The product of a gate of each head: how much is corrected (beta). It has too
        few outputs for ranks to divide its quantized blocks.
        """
        sizes = self._inputs(["b_proj"], (self.heads,), Shard.COLUMN)
        return evolve(sizes, plain=True)

    @property
    def gate_ranks(self) -> LinearSizes:
        """The first product of decays, and of gates of results."""
        names = ["f_a_proj", "g_a_proj"]
        sizes = self._inputs(names, (self.head_dim,) * 2, Shard.NONE)
        return evolve(sizes, whole=sizes.names)

    @property
    def decays(self) -> LinearSizes:
        """The second product of decays."""
        return self._of_rank("f_b_proj")

    @property
    def gates(self) -> LinearSizes:
        """The second product of gates of results."""
        return self._of_rank("g_b_proj")

    def _inputs(
        self, names: list[str], outputs: tuple[int, ...], shard: Shard
    ) -> LinearSizes:
        return LinearSizes(
            names=tuple(f"{NAME}.{name}" for name in names),
            outputs=outputs,
            inputs=self.hidden_size,
            shard=shard,
        )

    def _of_rank(self, name: str) -> LinearSizes:
        return LinearSizes(
            names=(f"{NAME}.{name}",),
            outputs=(self.size,),
            inputs=self.head_dim,
            shard=Shard.COLUMN,
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the heads' results."""
        return LinearSizes(
            names=(f"{NAME}.o_proj",),
            outputs=(self.hidden_size,),
            inputs=self.size,
            shard=Shard.ROW,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        gates = (self.strengths, self.gate_ranks, self.decays, self.gates)
        return (self.inputs, *gates, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        matrices = sum(sizes.elements for sizes in self.matrices)
        norms = self.norms.elements(self.hidden_size) + self.head_dim
        return matrices + norms + self.width * self.channels + self.size + self.heads

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.size + self.heads + self.norms.float32_elements(self.hidden_size)

    # --- memory -------------------------------------------------------------------------

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence."""
        heads = summed_state(self.heads, (self.head_dim, self.head_dim))
        return (conv_state(self.channels, self.width), heads)

    @property
    def pending_elements(self) -> int:
        """Elements that a token of a row with drafts takes until they are accepted."""
        return self.channels + self.size + self.heads

    def activation_bytes(self, element: int) -> int:
        """Returns a token's bytes at its widest place, on a GPU or on the CPU, where the
        rule has its own float32 copies of each head's query, key, value and decays;
        `element` is the bytes of an element of activations.
        """
        products = 2 * self.channels + 3 * self.size + 2 * self.head_dim + self.heads
        of_heads = self.heads * (5 * self.head_dim + 1)
        return products * element + 4 * of_heads


@frozen(eq=False, kw_only=True)
class KimiDeltaWeights:
    """The weights of one layer's Kimi delta attention."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    strengths: Linear = field(metadata=PLAIN_LEAF)
    gate_ranks: Linear
    decays: Linear
    gates: Linear
    conv: "Tensor"  # [channels, width]
    step_bias: "Tensor"  # [heads, head_dim] float32
    rates: "Tensor"  # [heads] float32: how fast a state fades
    out_norm: Norm  # [head_dim], of each head's result
    out: Linear


def read_kimi_delta(reader: ConfigReader, norms: NormRule) -> KimiDelta:
    """Returns the Kimi delta attention of a model, from a config. Raises
    `ModelConfigError`.
    """
    return KimiDelta(
        hidden_size=reader.size("hidden_size"),
        heads=reader.size("linear_num_heads"),
        head_dim=reader.size("linear_head_dim"),
        width=reader.size("linear_conv_kernel_dim", low=2),
        norms=norms,
    )


def empty_kimi_delta(sizes: KimiDelta, make: WeightMaker) -> KimiDeltaWeights:
    """Returns uninitialised weights of these sizes."""
    before, _ = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return KimiDeltaWeights(
        norm=before,
        inputs=make.linear(sizes.inputs),
        strengths=make.linear(sizes.strengths),
        gate_ranks=make.linear(sizes.gate_ranks),
        decays=make.linear(sizes.decays),
        gates=make.linear(sizes.gates),
        conv=make.tensor(sizes.channels, sizes.width),
        step_bias=make.tensor(sizes.heads, sizes.head_dim, dtype="float32"),
        rates=make.vector(sizes.heads, "float32"),
        out_norm=Norm(make.vector(sizes.head_dim), sizes.norms.eps),
        out=make.linear(sizes.out),
    )


def kimi_delta_parts(
    sizes: KimiDelta, weights: KimiDeltaWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from sublayer_norm_parts(weights.norm, None, sizes.norms)
    for matrix, leaf in (
        (sizes.inputs, weights.inputs),
        (sizes.strengths, weights.strengths),
        (sizes.gate_ranks, weights.gate_ranks),
        (sizes.decays, weights.decays),
        (sizes.gates, weights.gates),
        (sizes.out, weights.out),
    ):
        yield from weight_parts(matrix, leaf, form)
    for kind, conv in zip(KINDS, weights.conv.chunk(len(KINDS)), strict=True):
        yield from conv_parts(f"{NAME}.{kind}_conv1d", conv)
    yield WeightPart(f"{NAME}.dt_bias", weights.step_bias.flatten())
    shape = (1, 1, sizes.heads, 1)
    yield WeightPart(f"{NAME}.A_log", weights.rates, _rates, shape)
    rule = evolve(sizes.norms, offset=False)
    yield norm_part(f"{NAME}.o_norm", weights.out_norm, rule)


def _rates(stored: "Tensor") -> "Tensor":
    return exponentials(stored).flatten()


def mix_kimi_delta(
    sizes: KimiDelta,
    weights: KimiDeltaWeights,
    rows: "Tensor",
    norm: Norm | None,
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the gated results of the heads of layer `index` [tokens, size], of rows
    [tokens, hidden], normalised if there is `norm`; updates the states.
    """
    from minfer.kernels.gated_norm import gated_norm

    mixed = norm_linear(rows, norm, weights.inputs, step.products)
    strengths = norm_linear(rows, norm, weights.strengths, step.products)
    ranks = norm_linear(rows, norm, weights.gate_ranks, step.products)
    of_decays, of_results = (rank.contiguous() for rank in ranks.chunk(2, 1))
    decays = linear(of_decays, weights.decays, step.products)
    gates = linear(of_results, weights.gates, step.products)
    update = partial(_update_states, sizes, weights)
    attended = step.update_states(index, update, mixed, decays, strengths)
    results = attended.flatten(1)
    return gated_norm(results, gates, weights.out_norm, sizes.head_dim, "sigmoid")


def _update_states(
    sizes: KimiDelta,
    weights: KimiDeltaWeights,
    state: LayerState,
    work: "StateWork",
    mixed: "Tensor",
    decays: "Tensor",
    strengths: "Tensor",
) -> "Tensor":
    """Returns the results of the heads [tokens, heads, head_dim]; updates states."""
    from minfer.kernels.gated_rule import gated_rule
    from minfer.kernels.rule_arguments import DecayGates
    from minfer.kernels.short_conv import short_conv

    convolved = short_conv(
        mixed, weights.conv, None, "silu", state.part(CONVOLUTION), work
    )
    heads = (len(mixed), sizes.heads, sizes.head_dim)
    q, k, v = (part.view(heads) for part in convolved.chunk(len(KINDS), 1))
    return gated_rule(
        q,
        k,
        v,
        DecayGates(decays.view(heads), weights.step_bias, weights.rates),
        strengths,
        state.part(STATE),
        work,
        l2_eps=L2_EPS,
        scale=sizes.head_dim**-0.5,
    )
