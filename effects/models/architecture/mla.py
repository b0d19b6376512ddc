"""Multi-head latent attention, one of the attention types: sizes, weights, and its step.

Theory. A token's keys and values of all heads are products of one small vector, its
*latent*, and the cache keeps that vector and one rotated key that all heads share
(DeepSeek-V2, 2024): 576 numbers a token and layer where 16 heads of keys and values have
5,120. With k_h = W_h c for the part of a key that is not rotated, a score q_h . k_h is
(W_h^T q_h) . c, so a query can be multiplied with the latents themselves: in the
*absorbed* form all heads read one vector of 576, as one key head would be read, and the
same for values. It needs 3.4 times the multiplications of keys and values that are
expanded first, but expands nothing: best for few queries of a long context. The *latent*
form expands the context's latents: best for long chunks. The cache chooses on the CPU,
`Routes` on a GPU.

Rotated dimensions stand in the order of `Rope.order`. Some models rotate nothing
(Kimi-Linear): the key that all heads share then has angles of 0.

With tensor parallelism, heads are split: products of heads by column, the one after
attention by row; the latents are the same on all ranks.
"""

from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.gqa import partial_ranges
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
from minfer.effects.models.architecture.model_step import KeptTokens, ModelStep
from minfer.effects.models.architecture.products import add_product, norm_linear
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.query_scale import QueryScale, read_query_scale
from minfer.effects.models.architecture.rope_scaling import (
    UNROTATED,
    Rope,
    softmax_factor,
)
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import LatentWeights, Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

LATENT_NORMS = NormRule(1e-6)  # of latents, whatever the config says
# Bytes of expanded keys and values at once on a GPU, at most, unless those of a step's
# own tokens are more for one head.
MAX_EXPANDED_BYTES: Final = 1 << 27


@frozen
class LatentPieces:
    """How latents are expanded on a GPU: some tokens and some heads at a time."""

    heads: int
    tokens: int  # of the history; the step's own tokens are one piece
    bytes: int  # of memory, all results that are merged included


@frozen(kw_only=True)
class MLA:
    """Sizes of one layer's attention, in elements."""

    hidden_size: int
    heads: int
    query_rank: int | None  # of the latents of queries; None: queries have none
    rank: int  # of the latents of keys and values
    plain_dim: int  # of a head's queries and keys, not rotated
    rope_dim: int  # rotated, the same key for all heads
    value_dim: int
    rope: Rope
    scale: float  # multiplies the scores
    query_scale: QueryScale | None = None  # and factors of queries by position
    norms: NormRule
    bias: bool = False  # of the products that make latents
    out_bias: bool = False
    window: None = None
    sink_tokens: int = 0

    def for_rank(self, rank_info: RankInfo) -> "MLA":
        """Returns the sizes of one rank's heads. Raises `UnsupportedModelError`."""
        heads = rank_info.share(self.heads, "attention heads (num_attention_heads)")
        return evolve(self, heads=heads)

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of what is kept of a token."""
        return self.rank + self.rope_dim

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.rope_dim

    # --- weights ------------------------------------------------------------------------

    @property
    def inputs(self) -> LinearSizes:
        """The product of queries, or of their latents, and of the latents."""
        query, width = "self_attn.q_a_proj", self.query_rank
        latents = "self_attn.kv_a_proj_with_mqa"
        whole: tuple[str, ...] = (query, latents)
        if width is None:
            query, width = "self_attn.q_proj", self.heads * self.query_dim
            whole = (latents,)
        return LinearSizes(
            names=(query, latents),
            whole=whole,
            outputs=(width, self.latent_dim),
            inputs=self.hidden_size,
            shard=Shard.NONE,
        )

    @property
    def queries(self) -> LinearSizes:
        """The product of queries from their latents."""
        return LinearSizes(
            names=("self_attn.q_b_proj",),
            outputs=(self.heads * self.query_dim,),
            inputs=self.query_rank or 0,
            shard=Shard.COLUMN,
        )

    @property
    def expansion(self) -> LinearSizes:
        """The product of keys and values from latents: of each head its key, not rotated,
        and its value.
        """
        return LinearSizes(
            names=("self_attn.kv_b_proj",),
            outputs=(self.heads * (self.plain_dim + self.value_dim),),
            inputs=self.rank,
            shard=Shard.COLUMN,
            plain=True,
        )

    @property
    def out(self) -> LinearSizes:
        """The product that mixes the heads' results."""
        return LinearSizes(
            names=("self_attn.o_proj",),
            outputs=(self.hidden_size,),
            inputs=self.heads * self.value_dim,
            shard=Shard.ROW,
            bias=self.out_bias,
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        queries = (self.queries,) if self.query_rank else ()
        return (self.inputs, *queries, self.expansion, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms and biases included."""
        latent_norms = self.rank + (self.query_rank or 0)
        biases = self.latent_dim + (self.query_rank or 0) if self.bias else 0
        out = self.norms.elements(self.hidden_size) + self.hidden_size * self.out_bias
        matrices = sum(matrix.matrix_elements for matrix in self.matrices)
        return matrices + latent_norms + biases + out

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.norms.float32_elements(self.hidden_size)

    # --- memory -------------------------------------------------------------------------

    @property
    def unit_elements(self) -> int:
        """Factors of 1 of norms that have none in a checkpoint: there are no such."""
        return 0

    @property
    def shares_keys_of(self) -> int | None:
        """The layer whose latents it reads: it has its own."""
        return None

    @property
    def layers_a_slot(self) -> int:
        """How many such layers share a place in the cache."""
        return 1

    @property
    def kv_layout(self) -> KvLayout:
        """What the cache holds of a token."""
        return "latents"

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of what is kept of a token in the cache of a layer."""
        return (self.latent_dim,)

    @property
    def kv_elements(self) -> int:
        """A token's elements in the cache of a layer."""
        return self.latent_dim

    def activation_bytes(self, element: int, kv_element: int) -> int:
        """Returns a token's bytes at attention's widest place on the CPU."""
        queries = self.heads * (self.query_dim + self.latent_dim)
        results = self.heads * (self.rank + self.value_dim)
        copies = queries * kv_element if kv_element != element else 0
        return (queries + results + self.latent_dim) * max(element, 4) + copies

    @property
    def cuda_activation_elements(self) -> int:
        """Elements of a token at attention's widest place on a GPU."""
        return self.heads * (self.query_dim + self.latent_dim + 2 * self.rank)

    def pieces(self, tokens: int, element: int) -> LatentPieces:
        """Returns the pieces for a step of `tokens` prefill tokens, whose numbers have
        `element` bytes.
        """
        head_bytes = (self.plain_dim + self.value_dim) * element
        copied_bytes = self.query_dim * element  # keys of a head, for flash-attn
        max_heads = min(self.heads, max(1, MAX_EXPANDED_BYTES // (tokens * head_bytes)))
        heads = ceil(self.heads / ceil(self.heads / max_heads))
        size = max(1, MAX_EXPANDED_BYTES // (heads * head_bytes))
        expanded = max(size, tokens) * heads * (head_bytes + copied_bytes)
        latents = (size + tokens) * self.latent_dim * element
        # A piece's result, and the merged one in float32; their sums of exponentials.
        results = tokens * heads * (self.value_dim * (element + 4) + 3 * 4)
        return LatentPieces(heads, size, expanded + latents + results)

    def cuda_partial_bytes(self, rows: int, length: int) -> int:
        """Returns the bytes of partial results on a GPU, as for grouped-query attention
        with one key head.
        """
        return 4 * partial_ranges(rows, 1, length) * self.heads * (self.rank + 1)


@frozen(eq=False, kw_only=True)
class MLAWeights:
    """The weights of one layer's attention."""

    norm: Norm | None  # [hidden], of the input
    inputs: Linear
    query_norm: Norm | None  # [query_rank]; None: queries have no latents
    queries: Linear | None
    latents: LatentWeights
    out: Linear
    after: Norm | None = None  # [hidden], of the result


def read_mla(
    reader: ConfigReader, family: Family, norms: NormRule, rope: Rope
) -> tuple[MLA, ...]:
    """Returns the attention of each layer, from a config. Raises `ModelConfigError`."""
    rope_dim = reader.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.error("qk_rope_head_dim", "even, as its halves are paired")
    plain_dim = reader.size("qk_nope_head_dim")
    width = plain_dim + rope_dim
    # transformers takes the frequencies from it, where a config has it.
    head_dim = width if family.positions.partial else rope_dim
    if reader.size("head_dim", head_dim) != head_dim:
        raise reader.error("head_dim", f"null or {head_dim}, which follows from the rest")
    if rope.partial != 1 and rope.rotary_dim(width) != rope_dim:
        raise reader.error(
            "qk_rope_head_dim",
            f"the share partial_rotary_factor ({rope.partial:g}) of {width}, the width "
            f"of a head (with qk_nope_head_dim)",
        )
    rank = None if reader.is_absent("q_lora_rank") else reader.size("q_lora_rank")
    scale = width**-0.5
    if family.positions.rotated_layers == "none":
        rope = UNROTATED
    else:
        interleaved = reader.flag("rope_interleave")
        rope = evolve(rope, partial=1.0, interleaved=interleaved)
        scale *= softmax_factor(reader)
    attention = MLA(
        hidden_size=reader.size("hidden_size"),
        heads=reader.size("num_attention_heads"),
        query_rank=rank,
        rank=reader.size("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=reader.size("v_head_dim"),
        rope=rope,
        scale=scale,
        query_scale=read_query_scale(reader, family),
        norms=norms,
        bias=reader.is_set(family.biases.qkv),
        out_bias=reader.is_set(family.biases.out),
    )
    return (attention,) * reader.size("num_hidden_layers")


def empty_mla(sizes: MLA, make: WeightMaker) -> MLAWeights:
    """Returns uninitialised weights of these sizes."""
    rank, inputs = sizes.query_rank, make.linear(sizes.inputs)
    if sizes.bias:
        inputs = evolve(inputs, bias=make.vector(sum(inputs.parts)).zero_())
    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return MLAWeights(
        norm=before,
        inputs=inputs,
        query_norm=None if rank is None else make.norm(rank, LATENT_NORMS),
        queries=None if rank is None else make.linear(sizes.queries),
        latents=LatentWeights(
            norm=make.norm(sizes.rank, LATENT_NORMS),
            expansion=make.linear(sizes.expansion),
        ),
        out=make.linear(sizes.out),
        after=after,
    )


def mla_parts(
    sizes: MLA, weights: MLAWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    order_queries = _turn_last(sizes, sizes.query_dim)
    order_latents = _turn_last(sizes, sizes.latent_dim)
    yield from sublayer_norm_parts(weights.norm, weights.after, sizes.norms)
    has_query_latents = sizes.query_rank is not None
    query_name, _ = sizes.inputs.names
    for weight_part in weight_parts(sizes.inputs, weights.inputs, form):
        if weight_part.matrix != query_name:
            yield weight_part.rearranged(order_latents)
        else:
            yield (
                weight_part
                if has_query_latents
                else weight_part.rearranged(order_queries)
            )
    if weights.inputs.bias is not None:
        query, latent = bias_parts(sizes.inputs, weights.inputs)
        if has_query_latents:  # queries themselves have none
            yield query
        yield latent.rearranged(order_latents)
    if weights.query_norm is not None and weights.queries is not None:
        yield norm_part("self_attn.q_a_layernorm", weights.query_norm, LATENT_NORMS)
        for weight_part in weight_parts(sizes.queries, weights.queries, form):
            yield weight_part.rearranged(order_queries)
    yield norm_part("self_attn.kv_a_layernorm", weights.latents.norm, LATENT_NORMS)
    yield from weight_parts(sizes.expansion, weights.latents.expansion, form)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def _turn_last(sizes: MLA, width: int) -> "Callable[[Tensor], Tensor] | None":
    """Returns what brings the last, rotated dimensions of each vector of `width` rows of
    a tensor into minfer's order.
    """
    order = sizes.rope.order(sizes.rope_dim)
    if order is None:
        return None
    plain = width - sizes.rope_dim
    dimensions = [*range(plain), *(plain + dimension for dimension in order)]

    def arrange(stored: "Tensor") -> "Tensor":
        by_vector = stored.reshape(-1, width, *stored.shape[1:])
        return by_vector[:, dimensions].reshape(stored.shape)

    return arrange


def store_mla(
    weights: MLAWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Write latents of layer `index` for the residual stream `hidden` [tokens, hidden],
    or for normalised rows `x`, as `attend_mla` does.
    """
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    products = norm_linear(source, norm, weights.inputs, step.products)
    latent = products[:, weights.inputs.parts[0] :]
    step.cache.store_latent(step.batch, index, latent, weights.latents)


def attend_mla(
    weights: MLAWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    kept: KeptTokens | None,
    x: "Tensor | None" = None,
) -> "Tensor":
    """Returns the residual stream with the attention of layer `index` added: of the
    kept tokens, or of all; that of normalised rows `x`, if there are any.
    """
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    products = norm_linear(source, norm, weights.inputs, step.products)
    query, latent = products.split_with_sizes(weights.inputs.parts, 1)
    if weights.query_norm is not None and weights.queries is not None:
        query = norm_linear(
            query.contiguous(), weights.query_norm, weights.queries, step.products
        )
    attended = step.cache.mix_latent(step.batch, index, query, latent, weights.latents)
    if kept is not None:
        keep, step = kept.tokens, kept.step
        hidden, attended = hidden.index_select(0, keep), attended.index_select(0, keep)
    add_product(
        hidden, attended, weights.out, step.products, step.communicator, weights.after
    )
    return hidden
