"""Grouped-query attention, one of the attention types: sizes, weights, and its step.

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

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from minfer.effects.models.architecture.kv_format import KvLayout
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
from minfer.effects.models.architecture.products import (
    add_product,
    gate_heads,
    norm_heads,
    norm_linear,
)
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.query_scale import QueryScale, read_query_scale
from minfer.effects.models.architecture.rope_scaling import (
    FULL,
    SLIDING,
    UNROTATED,
    Rope,
)
from minfer.effects.models.architecture.windows import read_rotated, read_windows
from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.families.attention_keys import HeadGateKeys, QkNormFactors
from minfer.effects.models.families.family import Family
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import HeadGate, HeadWeights, Linear, Norm, Shard, WholeNorms

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANGE_TOKENS = 4096  # the most tokens that one program of Flash-Decoding reads
NUM_PROCESSORS = 132  # of a GPU, which the splits should fill
RANGES_PER_PROCESSOR = 4


@frozen(kw_only=True)
class GQA:
    """Sizes of one layer's attention, in elements."""

    hidden_size: int
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
        """The product of queries, keys and values."""
        names = [self.stored_qkv] if self.stored_qkv else ["q_proj", "k_proj", "v_proj"]
        outputs = [self.q_size, self.kv_size, self.kv_heads * self.value_width]
        if not self.stored_qkv:
            count = 3 - self.keys_are_values if self.new_kv_heads else 1
            names, outputs = names[:count], outputs[:count]
        return LinearSizes(
            names=tuple(f"self_attn.{name}" for name in names),
            outputs=tuple(outputs),
            inputs=self.hidden_size,
            shard=Shard.COLUMN,
            bias=self.qkv_bias,
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
        )

    @property
    def gate_matrix(self) -> LinearSizes | None:
        """The product of gates, if there are any."""
        if self.gate is None:
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


@frozen(eq=False, kw_only=True)
class GQAWeights:
    """The weights of one layer's attention."""

    norm: Norm | None  # [hidden], of the input
    qkv: Linear
    whole_norms: WholeNorms | None = None  # of the queries and keys of all heads
    heads: HeadWeights
    gate: HeadGate | None = None
    out: Linear
    after: Norm | None = None  # [hidden], of the result


def read_gqa(
    reader: ConfigReader, family: Family, norms: NormRule, ropes: Mapping[str, Rope]
) -> tuple[GQA, ...]:
    """Returns the attention of each layer, from a config. Raises `ModelConfigError`,
    `UnsupportedModelError`.
    """
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    if reader.is_absent("head_dim") and hidden % heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    head_dim = reader.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise reader.error(
            "head_dim", f"even, which {head_dim} is not, as its halves are paired"
        )
    for rope in ropes.values():
        for key, factors in (
            ("short_factor", rope.short_factors),
            ("long_factor", rope.long_factors),
        ):
            pairs = rope.rotary_dim(head_dim) // 2
            if rope.kind == "longrope" and len(factors) != pairs:
                raise reader.error(
                    "rope_scaling", f"with a {key} for each of {pairs} rotated pairs"
                )
        if rope.kind == "dynamic" and head_dim == 2:
            raise reader.error("head_dim", "above 2, as a base is scaled by it")
        if rope.rotary_dim(head_dim) % 4 and rope.partial != 1:
            raise reader.error(
                "partial_rotary_factor", f"a quarter of {head_dim}, or more"
            )
    scores, qk_norm = family.scores, family.qk_norm
    divisor = reader.positive(scores.root_of) if scores.root_of else head_dim
    scale: float = divisor**-0.5 if scores.scaled else 1.0
    if scores.multiplier:
        # transformers divides scores by a root where it is null, and not where there is
        # none.
        default = None if scores.multiplier in reader.config else 1.0
        scale = reader.positive(scores.multiplier, default)
    attention = GQA(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        score_cap=reader.optional_positive(scores.cap),
        norms=norms,
        qk_norm=reader.is_set(qk_norm.present),
        qk_norm_over=qk_norm.over,
        qk_norm_after_rope=qk_norm.after_rope,
        qk_norm_factors=qk_norm.factors,
        qk_norm_names=qk_norm.names,
        qkv_bias=reader.is_set(family.biases.qkv),
        out_bias=reader.is_set(family.biases.out),
        sinks_name=scores.sinks_name,
        value_dim=_read_value_dim(reader, family, head_dim),
        value_scale=reader.optional_positive(family.heads.value_scale) or 1.0,
        stored_qkv=family.stored.qkv,
        # With one key head, that is all queries, keys, values.
        qkv_by_key_head=family.stored.qkv_by_key_head and kv_heads > 1,
        value_norm=family.heads.value_norm,
        gate=family.heads.gate,
        gates_by_head=_gates_by_head(reader, family),
    )
    ropes = {
        kind: evolve(rope, interleaved=family.positions.interleaved)
        for kind, rope in ropes.items()
    }
    windows = read_windows(reader, family)
    layers = zip(
        windows,
        read_rotated(reader, family, windows),
        _heads_by_layer(reader, family, attention, len(windows)),
        strict=True,
    )
    chunks = family.windows.where == "chunked"
    window_kv_heads = kv_heads * family.heads.window_kv_multiple
    if heads % window_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"such that {window_kv_heads}, those of layers with a window, are a divisor "
            f"of num_attention_heads = {heads}",
        )
    attentions = (
        evolve(
            attention,
            heads=layer_heads,
            window=window,
            chunk=(window or 0) if chunks else 0,
            rope=ropes[SLIDING if window else FULL] if rotated else UNROTATED,
            query_scale=read_query_scale(reader, family, rotated=rotated),
            sinks=scores.sinks is True or (bool(scores.sinks) and window is not None),
            kv_heads=kv_heads if window is None else window_kv_heads,
        )
        for window, rotated, layer_heads in layers
    )
    has_unit_heads = reader.is_set(qk_norm.unit)
    return tuple(
        _with_unit_heads(attention, norms.eps)
        if has_unit_heads and attention.rope != UNROTATED
        else attention
        for attention in attentions
    )


def _read_value_dim(reader: ConfigReader, family: Family, head_dim: int) -> int | None:
    """Returns the width of values; None: that of keys. Raises `ModelConfigError`."""
    if not family.heads.value_dim:
        return None
    value_dim = reader.size(family.heads.value_dim)
    if value_dim > head_dim:
        raise reader.error(family.heads.value_dim, f"at most head_dim = {head_dim}")
    return value_dim


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


def _with_unit_heads(attention: GQA, eps: float) -> GQA:
    """Returns an attention whose query and key heads are normalised after the rotation,
    without factors, as one that normalises them before: a norm of `eps` undoes the factor
    of cosines and sines, but for its eps.
    """
    rope = attention.rope
    if rope is None:
        return attention
    return evolve(
        attention,
        rope=evolve(rope, attention_factor=1.0),
        unit_heads=eps / rope.attention_factor**2,
    )


def _heads_by_layer(
    reader: ConfigReader, family: Family, attention: GQA, layers: int
) -> list[int]:
    """Returns the query heads of each layer."""
    key = family.heads.by_layer
    listed = reader.config.get(key) if key else None
    if listed is None:
        return [attention.heads] * layers
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(
            type(heads) is not int or heads < 1 or heads % attention.kv_heads
            for heads in listed
        )
    ):
        raise reader.error(
            key,
            f"null or a list of num_hidden_layers = {layers} multiples of "
            f"num_key_value_heads = {attention.kv_heads}",
        )
    return listed


def _gates_by_head(reader: ConfigReader, family: Family) -> bool:
    """Returns whether a gate is of a whole head."""
    key = family.heads.gate.granularity if family.heads.gate else ""
    if not key:
        return False
    granularity = reader.config.get(key)
    if granularity not in (True, "per-head", "per-element"):
        raise reader.error(key, "true, 'per-head' or 'per-element'")
    return bool(granularity != "per-element")


def empty_gqa(sizes: GQA, make: WeightMaker) -> GQAWeights:
    """Returns uninitialised weights of these sizes."""

    each_head = sizes.qk_norm and sizes.qk_norm_over == "head"
    whole_norms = None
    if sizes.qk_norm and not each_head:
        whole_norms = WholeNorms(
            make.norm(sizes.q_size, sizes.norms), make.norm(sizes.kv_size, sizes.norms)
        )

    def head_norm(heads: int) -> Norm | None:
        if sizes.unit_heads is not None:
            return Norm(make.vector(sizes.head_dim).fill_(1), sizes.unit_heads)
        if not each_head:
            return None
        own = heads if sizes.qk_norm_factors != "shared" else 0
        return make.norm(sizes.head_dim, evolve(sizes.norms, bias=False), own)

    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return GQAWeights(
        norm=before,
        qkv=make.linear(sizes.qkv),
        whole_norms=whole_norms,
        heads=HeadWeights(
            q_norm=head_norm(sizes.heads),
            k_norm=head_norm(sizes.kv_heads) if sizes.new_kv_heads else None,
            v_norm=make.unit_norm(sizes.head_dim, sizes.norms)
            if sizes.unit_elements
            else None,
            norms_after_rope=sizes.qk_norm_after_rope,
            sinks=make.vector(sizes.heads, "float32") if sizes.sinks else None,
        ),
        gate=_empty_gate(sizes, make),
        out=make.linear(sizes.out),
        after=after,
    )


def _empty_gate(sizes: GQA, make: WeightMaker) -> HeadGate | None:
    """Returns the uninitialised gates of these sizes, if there are any."""
    if sizes.gate is None or sizes.gate_matrix is None:
        return None
    return HeadGate(make.linear(sizes.gate_matrix), sizes.gate.activation)


def gqa_parts(
    sizes: GQA, weights: GQAWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    norms, heads = sizes.norms, weights.heads
    yield from sublayer_norm_parts(weights.norm, weights.after, norms)
    order = None if sizes.rope is None else sizes.rope.order(sizes.head_dim)
    for weight_part in (
        *weight_parts(sizes.qkv, weights.qkv, form),
        *bias_parts(sizes.qkv, weights.qkv),
    ):
        if sizes.stored_qkv:
            if sizes.qkv_by_key_head:
                queries_first = weight_part.rearranged(_queries_first(sizes))
                weight_part = evolve(queries_first, pieces=())
            yield _ordered(weight_part, order, sizes.qkv.outputs)
            continue
        of_values = weight_part.name.startswith("self_attn.v_proj")
        yield weight_part if of_values else _ordered(weight_part, order)
    q_norm, k_norm = heads.q_norm, heads.k_norm
    if weights.whole_norms is not None:
        q_norm, k_norm = weights.whole_norms.query, weights.whole_norms.key
    firsts = (sizes.first_head, sizes.first_kv_head)
    for name, norm, first in zip(
        sizes.qk_norm_names, (q_norm, k_norm), firsts, strict=True
    ):
        if norm is not None and sizes.qk_norm:
            yield from _head_norm_parts(sizes, name, norm, first, order)
    if heads.sinks is not None:
        yield WeightPart(f"self_attn.{sizes.sinks_name}", heads.sinks)
    if weights.gate is not None and (gate_matrix := sizes.gate_matrix):
        yield from weight_parts(gate_matrix, weights.gate.linear, form)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def _queries_first(sizes: GQA) -> "Callable[[Tensor], Tensor]":
    """Returns what turns outputs, in which the queries of each key head, the key and the
    value follow one another, to all queries, all keys, all values.
    """

    def arrange(stored: "Tensor") -> "Tensor":
        import torch

        group = sizes.heads // sizes.kv_heads + 2
        shape = (sizes.kv_heads, group, sizes.head_dim, *stored.shape[1:])
        kinds = stored.reshape(shape).split_with_sizes([group - 2, 1, 1], 1)
        return torch.cat([of_kind.flatten(0, 2) for of_kind in kinds])

    return arrange


def _head_norm_parts(
    sizes: GQA, name: str, norm: Norm, first: int, order: list[int] | None
) -> Iterator[WeightPart]:
    """Yields the tensors of a norm of heads, whose numbers begin with `first`, the
    dimensions of each in `order`.
    """

    def ordered(stored: "Tensor") -> "Tensor":
        return stored[..., order]

    if sizes.qk_norm_factors == "listed":
        for head, factors in enumerate(norm.weight, first):
            of_head = evolve(norm, weight=factors)
            yield _ordered(norm_part(f"{name}.{head}", of_head, sizes.norms), order)
    elif sizes.qk_norm_factors == "stacked":
        stacked = norm_part(name, norm, sizes.norms)
        yield stacked.rearranged(None if order is None else ordered)
    else:
        yield _ordered(norm_part(name, norm, sizes.norms), order)


def _ordered(
    weight_part: WeightPart, order: list[int] | None, outputs: tuple[int, ...] = ()
) -> WeightPart:
    """Returns a part of queries or keys, the dimensions of its heads in `order`; or of
    queries, keys and values of so many `outputs`, which are stored as one.
    """
    if order is None:
        return weight_part

    def ordered(stored: "Tensor") -> "Tensor":
        by_head = stored.reshape(-1, len(order), *stored.shape[1:])
        return by_head[:, order].reshape(stored.shape)

    def ordered_but_values(stored: "Tensor") -> "Tensor":
        import torch

        query, key, value = stored.split_with_sizes(outputs)
        return torch.cat((ordered(query), ordered(key), value))

    return weight_part.rearranged(ordered_but_values if outputs else ordered)


def attend_gqa(
    weights: GQAWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    keep: "Tensor | None",
    x: "Tensor | None" = None,
) -> "Tensor":
    """Returns the residual stream with the attention of layer `index` added: of the
    tokens `keep`, or of all; that of normalised rows `x`, if there are any.
    """
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    qkv = norm_linear(source, norm, weights.qkv, step.products)
    if weights.whole_norms is not None:
        norm_heads(qkv, weights.whole_norms, step.products, step.communicator)
    attended = step.cache.rotate_and_attend(step.batch, index, qkv, weights.heads)
    if keep is not None:
        # Of the other tokens, only keys and values are needed.
        hidden, attended = hidden.index_select(0, keep), attended.index_select(0, keep)
    if weights.gate is not None:
        gate_heads(attended, hidden, weights.norm, weights.gate, step.products)
    add_product(
        hidden, attended, weights.out, step.products, step.communicator, weights.after
    )
    return hidden
