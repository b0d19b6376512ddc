"""Grouped-query attention, one of the attention types: sizes, weights, and its step.

Theory. Each query head attends over keys and values of the tokens up to its own, or of
the last `window` of them; several query heads share one key head (Ainslie et al. 2023),
so that a token stores fewer keys and values. Queries, keys and values come from one fused
product; the cache normalises and rotates heads, stores the new keys and values, and
attends; the product that follows mixes the heads.

With tensor parallelism, heads are split: the fused product by column, the one after it by
row.
"""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.cache import PagedCache
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
from minfer.effects.models.products import norm_linear

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.effects.models.batch import Batch

RANGE = 8192  # the most tokens that one program of Flash-Decoding reads
PROCESSORS = 132  # of a GPU, which the splits should fill
RANGES_EACH = 4


@frozen(kw_only=True)
class GQA:
    """Sizes of one layer's attention, in elements."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # keys up to its own that a query attends to; None: all
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.kv_heads * self.head_dim

    # --- weights ------------------------------------------------------------------------

    @property
    def qkv(self) -> LinearSizes:
        """The product of queries, keys and values."""
        return LinearSizes(
            names=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            outputs=(self.q_size, self.kv_size, self.kv_size),
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
            inputs=self.q_size,
            shard=Shard.ROW,
            bias=self.out_bias,
        )

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices."""
        return self.qkv.matrix_elements + self.out.matrix_elements

    @property
    def parameters(self) -> int:
        """Elements of all weights, norms included."""
        norms = self.hidden_size + 2 * self.head_dim * self.qk_norm
        return self.qkv.elements + self.out.elements + norms

    # --- memory -------------------------------------------------------------------------

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of a token's keys and values in the cache of a layer."""
        return (2, self.kv_heads, self.head_dim)

    @property
    def kv_elements(self) -> int:
        """A token's elements in the cache of a layer."""
        return prod(self.kv_shape)

    def activation_bytes(self, element: int, kv_element: int) -> int:
        """Returns a token's bytes at attention's widest place on the CPU, for elements of
        so many bytes: of activations, and of the cache.

        Rotation works in float32: for narrower dtypes the rotated heads exist twice more
        in it. A cache of another dtype needs copies of queries, keys, values and results.
        """
        qkv = self.q_size + 2 * self.kv_size
        rotation = qkv * (element if element == 4 else 8)
        copies = (qkv + self.q_size) * kv_element if kv_element != element else 0
        return (qkv + 2 * self.q_size) * element + rotation + copies

    @property
    def cuda_activation_elements(self) -> int:
        """Elements of a token at attention's widest place on a GPU."""
        return 2 * self.q_size + 2 * self.kv_size

    def cuda_partial_bytes(self, rows: int, length: int) -> int:
        """Returns the bytes of Flash-Decoding's partial results on a GPU, for `rows`
        contexts of `length`: the splits fill the processors, and none has more than
        `RANGE` tokens.
        """
        ranges = rows * self.kv_heads * -(-length // RANGE)
        ranges = max(RANGES_EACH * PROCESSORS, ranges)
        return 4 * ranges * (self.heads // self.kv_heads) * (self.head_dim + 1)


@frozen(eq=False, kw_only=True)
class GQAWeights:
    """The weights of one layer's attention. None: the model has none."""

    norm: "Tensor"  # [hidden], of the input
    qkv: Linear
    q_norm: "Tensor | None"  # [head_dim]
    k_norm: "Tensor | None"  # [head_dim]
    out: Linear


def read_gqa(read: ConfigReader, family: Family) -> tuple[GQA, ...]:
    """Returns the attention of each layer, from a config. Raises `ModelConfigError`,
    `UnsupportedModelError`.
    """
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    if read.absent("head_dim") and hidden % heads:
        raise read.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    head_dim = read.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise read.error(
            "head_dim", f"even, which {head_dim} is not, as its halves are paired"
        )
    bias = "attention_bias" in family.bias_flags and read.flag("attention_bias")
    return tuple(
        GQA(
            hidden_size=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias or bias,
            out_bias=bias,
        )
        for window in _windows(read, family, read.size("num_hidden_layers"))
    )


def _windows(read: ConfigReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer, as transformers' configuration classes derive
    it.
    """
    window = _window(read, family)
    first = read.size("max_window_layers", low=0) if family.windows == "upper" else 0
    kinds = read.config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.error("layer_types", f"null or a list of num_hidden_layers = {layers}")
    other = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if other or (family.windows == "every" and window and "full_attention" in kinds):
        raise read.refusal(
            f"layer_types {other or kinds} are not known to {family.architecture}"
        )
    if "sliding_attention" in kinds and window is None:
        raise read.error(
            "layer_types", "all full_attention, as no sliding window is in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(read: ConfigReader, family: Family) -> int | None:
    """Returns the window of layers that have one, if the config sets it."""
    used = read.flag("use_sliding_window")
    if read.absent("sliding_window"):
        return None
    if family.windows == "none" and (used or read.absent("use_sliding_window")):
        raise read.refusal(f"sliding_window is not known to {family.architecture}")
    if used or family.windows == "every":
        return read.size("sliding_window", low=2)
    return None


def empty_gqa(sizes: GQA, make: Maker) -> GQAWeights:
    """Returns uninitialised weights of these sizes."""
    return GQAWeights(
        norm=make.vector(sizes.hidden_size),
        qkv=make.linear(sizes.qkv),
        q_norm=make.vector(sizes.head_dim) if sizes.qk_norm else None,
        k_norm=make.vector(sizes.head_dim) if sizes.qk_norm else None,
        out=make.linear(sizes.out),
    )


def gqa_parts(sizes: GQA, weights: GQAWeights) -> "Iterator[tuple[str, Tensor]]":
    """Yields each tensor's name in a layer of a checkpoint, and its place: a view."""
    yield "input_layernorm.weight", weights.norm
    yield from weight_parts(sizes.qkv, weights.qkv)
    yield from bias_parts(sizes.qkv, weights.qkv)
    if weights.q_norm is not None:
        yield "self_attn.q_norm.weight", weights.q_norm
    if weights.k_norm is not None:
        yield "self_attn.k_norm.weight", weights.k_norm
    yield from weight_parts(sizes.out, weights.out)
    yield from bias_parts(sizes.out, weights.out)


def mix_gqa(
    weights: GQAWeights,
    hidden: "Tensor",
    eps: float,
    index: int,
    batch: "Batch",
    cache: PagedCache,
) -> "Tensor":
    """Returns the results of the heads of layer `index`: [tokens, hidden] -> [tokens,
    heads * head_dim].
    """
    qkv = norm_linear(hidden, weights.norm, eps, weights.qkv)
    return cache.mix(batch, index, qkv, weights.q_norm, weights.k_norm)
