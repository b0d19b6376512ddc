"""Grouped-query attention, one of the attention types: its sizes. gqa_reader.py reads
them from a config, gqa_weights.py has the weights, gqa_step.py the step.

Theory. Each query head attends over keys and values of the tokens up to its own, or of
the last `window` of them; several query heads share one key head (Ainslie et al. 2023),
so that a token stores fewer keys and values. Queries, keys and values come from one fused
product; the cache normalises and rotates heads, stores the new keys and values, and
attends; the product that follows mixes the heads. With *sinks* each head has one more
logit, whose share of the softmax goes to no value (gpt-oss; Xiao et al. 2023). *Sink
tokens* are another thing: the first tokens of a sequence, whose keys and values are
attended to beside the window (attention_window.py). With attention within *chunks* of
positions (Llama 4), a query attends to the keys of its chunk up to its own: never to more
than a window as long as a chunk has, so that blocks are given back as for such windows.
Values may be narrower than keys (MiMo-V2-Flash): they are stored padded with zeros to
their width, so that the same kernels read both. Of keys of 192 and values of 128
dimensions a token keeps 384 numbers a head instead of 320.

With tensor parallelism, heads are split: the fused product by column, the one after it by
row.
"""

from math import prod
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from minfer.effects.models.architecture.kv_format import KvLayout
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
)
from minfer.effects.models.architecture.query_scale import QueryScale
from minfer.effects.models.architecture.rope_scaling import (
    Rope,
)
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.families.attention_keys import HeadGateKeys, QkNormFactors
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import Shard

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANGE_TOKENS = 4096  # the most tokens that one program of Flash-Decoding reads
NUM_PROCESSORS = 132  # of a GPU, which the splits should fill
RANGES_PER_PROCESSOR = 4


@frozen(kw_only=True)
class GQA:
    """Sizes of one layer's attention, in elements."""

    hidden_size: int
    # Width of what queries, keys and values are products of; None: the residual stream's.
    input_size: int | None = None
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # keys up to its own that a query attends to; None: all
    # Positions are in chunks of as many, and a query attends within its own; 0: they are
    # not. Then `window` is the same: as many keys, at most, are read.
    chunk: int = 0
    rope: Rope | None = None  # None: transformers' model handles positions
    scale: float  # multiplies the scores
    query_scale: QueryScale | None = None  # and factors of queries by position
    score_cap: float | None = None  # then they are cap * tanh(score / cap) (Gemma 2)
    norms: NormRule
    qk_norm: bool = False
    # Over each head, or over all heads together; after the rotation instead of before it.
    qk_norm_over: Literal["head", "all"] = "head"
    qk_norm_after_rope: bool = False
    qk_norm_factors: QkNormFactors = "shared"
    # The numbers of this rank's first heads of queries and keys in the model.
    first_head: int = 0
    first_kv_head: int = 0
    # The eps of a norm of query and key heads that has no factors; None: there is none.
    # As a rotation changes no length, it is computed before the rotation.
    unit_heads: float | None = None
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    sinks_name: str = "sinks"  # in a checkpoint
    # The name of queries, keys and values in a checkpoint that stores them as one; and
    # whether each key head is there behind its queries, before its values.
    stored_qkv: str = ""
    qkv_by_key_head: bool = False
    gate: HeadGateKeys | None = None  # of what attention returns
    gates_by_head: bool = False  # one for each head; else for each of its dimensions
    # Tokens at the beginning of a sequence that a query attends to beside its window.
    sink_tokens: int = 0
    # Values are what keys are before their norm and rotation; and are normalised.
    keys_are_values: bool = False
    value_norm: bool = False
    # The layer before it whose keys and values it reads instead of its own.
    shares_keys_of: int | None = None
    layers_a_slot: int = 1  # layers of this size that share a place in the cache
    # Values of another width than keys, which the cache pads with zeros to it; and their
    # factor (MiMo).
    value_dim: int | None = None
    value_scale: float = 1.0
    # What its input and its result are multiplied with (Falcon-H1); `scale` has the
    # former twice already.
    input_factor: float = 1.0
    result_factor: float = 1.0

    def for_rank(self, rank_info: RankInfo) -> "GQA":
        """Returns the sizes of one rank's heads. Of fewer key heads than ranks, several
        ranks have the same. Raises `UnsupportedModelError`.
        """
        ranks = rank_info.parallel.tensor
        heads = rank_info.share(self.heads, "attention heads (num_attention_heads)")
        shares_heads = self.kv_heads < ranks and ranks % self.kv_heads == 0
        kv_heads = (
            1
            if shares_heads
            else rank_info.share(self.kv_heads, "key heads (num_key_value_heads)")
        )
        if self.qkv_by_key_head and self.kv_heads % ranks:
            raise UnsupportedModelError(
                f"{ranks} ranks would share {self.kv_heads} key heads, each of which "
                f"{self.stored_qkv} has behind its queries; use fewer "
                f"(tensor_parallel_size)"
            )
        rank = rank_info.tensor_rank
        return evolve(
            self,
            heads=heads,
            kv_heads=kv_heads,
            first_head=rank * heads,
            first_kv_head=rank * self.kv_heads // ranks,
        )

    @property
    def new_kv_heads(self) -> int:
        """Key heads that it computes: 0, if it reads those of another layer."""
        return self.kv_heads if self.shares_keys_of is None else 0

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.kv_heads * self.head_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated, if there is a rotation."""
        return self.head_dim

    @property
    def pads_values(self) -> bool:
        """Whether values are copied to get the width of keys, or their factor."""
        return self.value_width != self.head_dim or self.value_scale != 1

    # --- weights ------------------------------------------------------------------------

    @property
    def qkv(self) -> LinearSizes:
        """The product of queries, keys and values, with gates before the queries if a
        checkpoint has them in one matrix.
        """
        names = [self.stored_qkv] if self.stored_qkv else ["q_proj", "k_proj", "v_proj"]
        queries = self.q_size + self.first_gates
        outputs = [queries, self.kv_size, self.kv_heads * self.value_width]
        if not self.stored_qkv:
            count = 3 - self.keys_are_values if self.new_kv_heads else 1
            names, outputs = names[:count], outputs[:count]
        return LinearSizes(
            names=tuple(f"self_attn.{name}" for name in names),
            outputs=tuple(outputs),
            inputs=self.input_size or self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.qkv_bias,
            bias_factors=(1 / self.input_factor,) * len(outputs),
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the heads' results."""
        return LinearSizes(
            names=("self_attn.o_proj",),
            outputs=(self.hidden_size,),
            inputs=self.heads * self.value_width,
            shard=Shard.ROW,
            bias=self.out_bias,
            factors=(self.input_factor * self.result_factor,),
            bias_factors=(self.result_factor,),
        )

    @property
    def gate_matrix(self) -> LinearSizes | None:
        """The product of gates, if there are any."""
        if self.gate is None or not self.gate.name:
            return None
        return LinearSizes(
            names=(self.gate.name,),
            outputs=(self.gate_size,),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
        )

    @property
    def gate_size(self) -> int:
        """Number of the gates of a token."""
        if self.gate is None:
            return 0
        return self.heads if self.gates_by_head else self.q_size

    @property
    def first_gates(self) -> int:
        """Gates of a token that `qkv` returns before the queries."""
        return 0 if self.gate is None or self.gate.name else self.gate_size

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        gate = self.gate_matrix
        return (self.qkv, self.out) if gate is None else (self.qkv, gate, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        norms = self.norms.elements(self.hidden_size)
        norms += self.qk_norm_elements
        matrices = sum(sizes.elements for sizes in self.matrices)
        return matrices + norms + self.heads * self.sinks

    @property
    def qk_norm_elements(self) -> int:
        """Elements of the norms of queries and keys."""
        if self.qk_norm_over == "all" or self.qk_norm_factors != "shared":
            return (self.q_size + self.kv_size) * self.qk_norm
        return (2 if self.new_kv_heads else 1) * self.head_dim * self.qk_norm

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        heads = self.qk_norm_elements * self.norms.wide
        heads += self.heads * self.sinks
        return heads + self.norms.float32_elements(self.hidden_size)

    @property
    def unit_elements(self) -> int:
        """Factors of 1, in float32, of norms that have none in a checkpoint."""
        return self.head_dim if self.value_norm and self.new_kv_heads else 0

    # --- memory -------------------------------------------------------------------------

    @property
    def kv_layout(self) -> KvLayout:
        """What the cache holds of a token."""
        return "keys and values"

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of a token's keys and values in the cache of a layer."""
        return (2, self.kv_heads, self.head_dim)

    @property
    def kv_elements(self) -> int:
        """A token's elements in the cache of a layer."""
        return prod(self.kv_shape)

    def activation_bytes(self, element: int, kv_element: int) -> int:
        """Returns a token's bytes at attention's widest place on the CPU; `element` and
        `kv_element` are the bytes of an element of activations and of the cache.

        Rotation works in float32: for narrower dtypes the rotated heads exist twice more
        in it. A cache of another dtype needs copies of queries, keys, values and results.
        """
        qkv = self.q_size + 2 * self.kv_size
        rotation = qkv * (element if element == 4 else 8)
        copies = (qkv + self.q_size) * kv_element if kv_element != element else 0
        copies += qkv * element * self.pads_values
        gates = self.gate_size * (element + 4 + 4)
        return (qkv + 2 * self.q_size) * element + rotation + copies + gates

    @property
    def cuda_activation_elements(self) -> int:
        """Elements of a token at attention's widest place on a GPU."""
        padded = (self.q_size + 2 * self.kv_size) * self.pads_values
        return 2 * self.q_size + 2 * self.kv_size + padded + self.gate_size

    def cuda_partial_bytes(self, rows: int, length: int) -> int:
        """Returns the bytes of Flash-Decoding's partial results on a GPU, for `rows`
        contexts of `length`: the splits fill the processors, and none has more than
        `MAX_RANGE_TOKENS` tokens.
        """
        ranges = partial_ranges(rows, self.kv_heads, length)
        return 4 * ranges * (self.heads // self.kv_heads) * (self.head_dim + 1)


def partial_ranges(rows: int, kv_heads: int, length: int) -> int:
    """Returns the ranges into which `rows` contexts of `length` are cut, at most."""
    ranges = rows * kv_heads * -(-length // MAX_RANGE_TOKENS)
    return max(RANGES_PER_PROCESSOR * NUM_PROCESSORS, ranges)


def padded_values(sizes: GQA, qkv: "Tensor") -> "Tensor":
    """Returns queries, keys and values [tokens, (heads + 2 * kv_heads) * head_dim] of a
    product whose values are narrower, or have a factor: the cache's values are as wide as
    keys.
    """
    if not sizes.pads_values:
        return qkv
    width = sizes.value_width
    first_value = sizes.q_size + sizes.kv_size
    padded = qkv.new_zeros(len(qkv), first_value + sizes.kv_size)
    padded[:, :first_value] = qkv[:, :first_value]
    values = qkv[:, first_value:].view(len(qkv), sizes.kv_heads, width)
    of_heads = padded[:, first_value:].view(len(qkv), sizes.kv_heads, sizes.head_dim)
    of_heads[..., :width] = values * sizes.value_scale
    return padded


def without_padding(sizes: GQA, attended: "Tensor") -> "Tensor":
    """Returns the results of heads [tokens, heads * value_width], of those whose values
    were padded.
    """
    width = sizes.value_width
    if width == sizes.head_dim:
        return attended
    by_head = attended.view(len(attended), sizes.heads, sizes.head_dim)
    return by_head[..., :width].flatten(1)
