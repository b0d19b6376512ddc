"""The CPU's KV cache and paged attention, in plain torch.

The cache keeps a token's keys and values side by side, so that one scatter writes both
and one gather of whole blocks reads both. Query heads that share a key head are treated
as several queries of that head, so keys are never repeated (grouped-query attention,
Ainslie et al. 2023).
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import Factory, evolve, frozen
from torch import Tensor

from minfer.effects.execution.cpu.attention_reads import (
    ChunkReads,
    DecodeGroup,
    LayerKind,
    plan_reads,
)
from minfer.effects.execution.cpu.latent_attention import LatentRead
from minfer.effects.execution.cpu.layer_cache import LayerCache
from minfer.effects.execution.device.cache_memory import CacheMemory, PagedState
from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.gqa import (
    GQA,
    padded_values,
    without_padding,
)
from minfer.effects.models.architecture.layers import Attention
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.query_scale import QueryScale
from minfer.effects.models.architecture.rope_scaling import Rope, inverse_frequencies
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import torch_dtype, torch_kv_dtype
from minfer.effects.models.layout.cache_layout import (
    CacheLayout,
    LayerPlace,
    plain_layout,
)
from minfer.effects.models.layout.shapes import MAX_MASK_NUMBERS
from minfer.kernels.cache_numbers import as_bytes
from minfer.kernels.leaves import HeadWeights, LatentWeights
from minfer.kernels.plain import normalise
from minfer.records.plan import Copy

Rotation = tuple[Rope, int]  # and the dimensions of a head that it turns
# Dtypes of which the attention of torch's CPU kernel returns sums of exponentials.
MERGEABLE_DTYPES = (torch.float32, torch.bfloat16)


@frozen(eq=False)
class KVCache:
    """Keys and values of all layers in blocks; `layers` are views of `memory`."""

    spec: ModelSpec
    layout: CacheLayout
    # Its numbers are [layers of a page, pages, block_size, *token], a token's shape being
    # `kv_shape` of the layers.
    memory: CacheMemory
    layers: Mapping[int, LayerCache]  # of those with attention, by their indices
    # [positions, 2, 1, head_dim] float32 by rotation: cosines, sines signed for `rotate`
    ropes: Mapping[Rotation, Tensor]
    query_scales: Mapping[QueryScale, Tensor]  # [positions, 1, 1] float32
    # the last batch, its reads, cosines and sines, and factors of queries
    step: list[Any] = Factory(list)
    # Keys and values of the last batch by layer, if layers read those of others.
    shared: dict[int, Tensor] | None = None

    def rotate_and_attend(
        self, batch: Batch, index: int, qkv: Tensor, heads: HeadWeights
    ) -> Tensor:
        """Norm and rotate heads, then `attend`; see `PagedCache`."""
        gqa = heads_of(self.spec, index)
        qkv = padded_values(gqa, qkv)
        if gqa.keys_are_values and gqa.new_kv_heads:
            qkv = torch.cat((qkv, qkv[:, gqa.q_size :]), 1)
        by_head = qkv.view(qkv.shape[0], -1, gqa.head_dim)
        if not heads.norms_after_rope:
            _norm_each_head(by_head, gqa, heads)
        if gqa.rope is not None:
            rotated = by_head[:, : gqa.heads + gqa.new_kv_heads]
            rotate(rotated, *self._prepared(batch)[2][gqa.rope, gqa.rotated])
        if heads.norms_after_rope:
            _norm_each_head(by_head, gqa, heads)
        if gqa.query_scale is not None:
            by_head[:, : gqa.heads].mul_(self._prepared(batch)[3][gqa.query_scale])
        out = self._cast(batch, index, qkv, Heads(gqa, gqa.scale, heads.sinks))
        return without_padding(gqa, out)

    def mix_latent(
        self,
        batch: Batch,
        index: int,
        query: Tensor,
        latent: Tensor,
        weights: LatentWeights,
    ) -> Tensor:
        """Norm and rotate, write latents, and attend; see `PagedCache`."""
        mla, (_, reads, angles, query_scales) = (
            latents_of(self.spec, index),
            self._prepared(batch),
        )
        table = self.layout.place(index).table
        compressed, by_head = latent[:, : mla.rank], query.view(len(query), mla.heads, -1)
        normalise(compressed, weights.norm, out=compressed)
        for rotated in (latent[:, None, mla.rank :], by_head[..., mla.plain_dim :]):
            rotate(rotated, *angles[mla.rope, mla.rotated])
        if mla.query_scale is not None:
            by_head.mul_(query_scales[mla.query_scale])
        _keep_finite(batch, latent)
        cache = self.layers[index]
        new = latent.to(cache.dtype)
        cache.write(batch.slots[table], new)
        read = LatentRead(mla, cache, weights, new)
        return read.attend(by_head, reads[LayerKind(table, None)], len(batch.rows))

    def attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None = None
    ) -> Tensor:
        """Write keys and values, and attend; see `PagedCache`."""
        gqa = heads_of(self.spec, index)
        heads = Heads(gqa, gqa.scale if scale is None else scale, None)
        return self._cast(batch, index, qkv, heads)

    def store(self, batch: Batch, index: int, kv: Tensor, heads: HeadWeights) -> None:
        """Norm and rotate keys, write keys and values; see `PagedCache`."""
        gqa = evolve(heads_of(self.spec, index), heads=0)
        kv = padded_values(gqa, kv)
        if gqa.keys_are_values:
            kv = torch.cat((kv, kv), 1)
        by_head = kv.view(len(kv), -1, gqa.head_dim)
        keys, heads = by_head[:, : gqa.new_kv_heads], evolve(heads, q_norm=None)
        if not heads.norms_after_rope:
            _norm_each_head(by_head, gqa, heads)
        if gqa.rope is not None:
            rotate(keys, *self._prepared(batch)[2][gqa.rope, gqa.rotated])
        if heads.norms_after_rope:
            _norm_each_head(by_head, gqa, heads)
        new = by_head.to(self.layers[index].dtype)
        _keep_finite(batch, new)
        new = new.view(len(new), 2, gqa.kv_heads, gqa.head_dim)
        self.layers[index].write(batch.slots[self.layout.place(index).table], new)

    def store_latent(
        self, batch: Batch, index: int, latent: Tensor, weights: LatentWeights
    ) -> None:
        """Norm, rotate and write latents; see `PagedCache`."""
        mla, angles = latents_of(self.spec, index), self._prepared(batch)[2]
        compressed = latent[:, : mla.rank]
        normalise(compressed, weights.norm, out=compressed)
        rotate(latent[:, None, mla.rank :], *angles[mla.rope, mla.rotated])
        _keep_finite(batch, latent)
        cache = self.layers[index]
        cache.write(batch.slots[self.layout.place(index).table], latent.to(cache.dtype))

    def _cast(self, batch: Batch, index: int, qkv: Tensor, heads: "Heads") -> Tensor:
        """Write keys and values, and attend, in the dtype that the cache reads; returns
        the results in that of `qkv`.
        """
        dtype = self.layers[index].dtype
        if qkv.dtype is dtype:
            return self._attend(batch, index, qkv, heads)
        out = self._attend(batch, index, qkv.to(dtype), heads)
        return out.to(qkv.dtype)

    def _attend(self, batch: Batch, index: int, qkv: Tensor, heads: "Heads") -> Tensor:
        """Write keys and values, and attend, in the dtype that the cache reads."""
        gqa = heads.gqa
        table, cache = self.layout.place(index).table, self.layers[index]
        reads = self._prepared(batch)[1][layer_kind(table, gqa)]
        qkv = qkv.view(qkv.shape[0], -1, gqa.head_dim)
        queries, new = qkv[:, : gqa.heads], qkv[:, gqa.heads :]
        if gqa.shares_keys_of is None:
            _keep_finite(batch, new)
            new = new.view(len(new), 2, gqa.kv_heads, gqa.head_dim)
            cache.write(batch.slots[table], new)
            if self.shared is not None:
                self.shared[index] = new
        elif self.shared is not None:
            new = self.shared[gqa.shares_keys_of]
        if not reads.chunks and reads.groups[0].rows is None:
            return heads.decode(queries, cache, reads.groups[0])
        decode_rows = batch.rows.shape[0]
        out = qkv.new_empty(qkv.shape[0], gqa.q_size)
        for group in reads.groups:
            if group.rows is None:
                out[:decode_rows] = heads.decode(queries[:decode_rows], cache, group)
            else:
                picked = queries.index_select(0, group.rows)
                out.index_copy_(0, group.rows, heads.decode(picked, cache, group))
        for chunk in reads.chunks:
            span = slice(chunk.first, chunk.last)
            heads.prefill(queries[span], new[span], cache, chunk, out[span])
        return out

    def _prepared(self, batch: Batch) -> list[Any]:
        if not self.step or self.step[0] is not batch:
            kinds = dict.fromkeys(
                layer_kind(place.table, attention)
                for _, place, attention in placed(self.spec, self.layout)
            )
            reads = plan_reads(batch, self.memory.numbers.shape[2], tuple(kinds))
            angles = {
                rotation: table.index_select(0, batch.positions).unbind(1)
                for rotation, table in self.ropes.items()
            }
            factors = {
                query_scale: table.index_select(0, batch.positions)
                for query_scale, table in self.query_scales.items()
            }
            self.step[:] = batch, reads, angles, factors
        return self.step

    def state(self, index: int) -> PagedState:
        """Returns where a layer's state is; see `PagedCache`."""
        return self.memory.states[index]

    @property
    def data(self) -> Tensor:
        """All of the cache but scales."""
        return self.memory.data

    def page_views(self) -> list[Tensor]:
        """Returns views [pages, ...] of all that is stored."""
        return self.memory.page_views()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy positions of blocks, in all layers; beside recurrent layers whole pages,
        which may be of states.
        """
        if self.layout.states is not None:
            for pages in self.page_views():
                for page_copy in copies:
                    pages[page_copy.target] = pages[page_copy.source]
            return
        for data in self._tensors():
            for block_copy in copies:
                data[:, block_copy.target, : block_copy.count] = data[
                    :, block_copy.source, : block_copy.count
                ]

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Zero newly allocated blocks of a row, the first of them from slot `start` on.

        Attention reads padding with weight 0. If the previous owner's numbers
        overflowed, that would be 0 * NaN, and the new owner would fail.
        """
        for data in self._tensors():
            full_blocks = blocks
            if start and blocks:
                data[:, blocks[0], start:] = 0
                full_blocks = blocks[1:]
            if full_blocks:
                data.index_fill_(1, torch.tensor(full_blocks), 0)

    def _tensors(self) -> list[Tensor]:
        """Returns all that is stored of tokens."""
        scales = [] if self.memory.scales is None else [self.memory.scales]
        return [as_bytes(self.memory.numbers), *scales]


def _norm_each_head(by_head: Tensor, gqa: GQA, heads: HeadWeights) -> None:
    """Normalise heads of queries, keys and values, `by_head` [tokens, heads + 2 *
    kv_heads, head_dim], in place, if the layer has norms of them.
    """
    sizes = gqa.heads, gqa.new_kv_heads, gqa.new_kv_heads
    norms = heads.q_norm, heads.k_norm, heads.v_norm
    for states, norm in zip(by_head.split_with_sizes(sizes, 1), norms, strict=True):
        if norm is not None:
            normalise(states, norm, out=states)


def _keep_finite(batch: Batch, new: Tensor) -> None:
    """Make what drafts write finite: a rejected draft leaves keys and values that its row
    later reads as padding.
    """
    if batch.verified is not None:
        draft_states = new[batch.verified.decode_rows : len(batch.rows)]
        torch.nan_to_num(draft_states, 0.0, 0.0, 0.0, out=draft_states)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place: `x` [tokens, heads, head_dim], `cos` and `sin` [tokens, 1,
    head_dim].

    `sin` is negative for the first half of a head, so rotating halves is a roll. Computed
    in float32 whatever the dtype of `x`.
    """
    rolled = x.roll(x.shape[-1] // 2, -1)
    if x.dtype is torch.float32:
        x.mul_(cos).addcmul_(rolled, sin)
    else:
        x.copy_((x * cos).addcmul_(rolled.float(), sin))


def make_cache(
    spec: ModelSpec,
    blocks: int,
    block_size: int,
    dtype: str | None = None,
    max_model_len: int | None = None,
    layout: CacheLayout | None = None,
) -> KVCache:
    """Returns a zeroed cache of `blocks` pages of `block_size` tokens, in the spec's KV
    dtype when `dtype` is None; without `layout`, all layers are one group.

    It is zeroed, as masked slots still enter the products with weight 0. The rotary table
    covers every position below `max_model_len` (the model's own limit when None) that the
    pool could hold; with windows in all layers, sequences can be longer than the pool.
    """
    layout = plain_layout(spec, block_size) if layout is None else layout
    layers, token = layout.layers_a_page, slot_shape(spec)
    shape = (layers, blocks, block_size, *token)
    cache_dtype = torch_kv_dtype(dtype or spec.kv_dtype)
    memory = CacheMemory.allocate(shape, 1, cache_dtype, layout, _zeros)
    numbers, scales = memory.numbers, memory.scales
    read = cache_dtype if cache_dtype.itemsize > 1 else torch_dtype(spec.dtype)
    length = max_model_len or spec.max_position_embeddings
    if None in spec.windows:
        length = min(length, blocks * block_size)
    tables = {(rope, dim): rope_table(rope, dim, length) for rope, dim in rotations(spec)}
    layer_caches = {
        index: LayerCache.of(
            _stored(numbers[place.slot], place.share, attention.kv_shape),
            read,
            None if scales is None else scales[place.slot],
        )
        for index, place, attention in placed(spec, layout)
    }
    factors = {
        query_scale: query_scale.table(length)[:, None, None]
        for query_scale in query_scales(spec)
    }
    shared: dict[int, Tensor] | None = None
    if any(layer.shares_keys_of is not None for layer in spec.layers):
        shared = {}
    return KVCache(spec, layout, memory, layer_caches, tables, factors, shared=shared)


def placed(
    spec: ModelSpec, layout: CacheLayout
) -> Iterator[tuple[int, LayerPlace, Attention]]:
    """Yields the index, the place and the attention of each layer that has one."""
    for index, layer in enumerate(spec.layers):
        if layer.attention is not None:
            yield index, layout.place(index), layer.attention


def slot_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the shape of a token's part of a place for a layer in the cache: that of
    the layers, if all have the same; else a number of elements.
    """
    attentions = [group.attention for group in spec.groups]
    if not spec.has_mixed_layers:
        return attentions[0].kv_shape
    sizes = (a.kv_elements * a.layers_a_slot for a in attentions)
    return (max(sizes),)


def _stored(data: Tensor, share: int, token: tuple[int, ...]) -> Tensor:
    """Returns a layer's part of its place in the cache: [pages, block_size, *token]."""
    if data.shape[2:] == token:
        return data
    size = prod(token)
    part = data[..., share * size : (share + 1) * size]
    return part.view(*part.shape[:-1], *token)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns memory from the kernel's zero pages, touched when written: torch.zeros
    would fill it now.
    """
    zeros = torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8))
    return zeros.view(dtype).view(shape)


def heads_of(spec: ModelSpec, index: int) -> GQA:
    """Returns the heads of a layer. Raises TypeError if it keeps latents."""
    attention = spec.layers[index].attention
    if not isinstance(attention, GQA):
        raise TypeError(f"layer {index} keeps latents, not keys and values")
    return attention


def latents_of(spec: ModelSpec, index: int) -> MLA:
    """Returns the latents of a layer. Raises TypeError if it keeps keys and values."""
    attention = spec.layers[index].attention
    if not isinstance(attention, MLA):
        raise TypeError(f"layer {index} keeps keys and values, not latents")
    return attention


def layer_kind(table: int, attention: Attention) -> LayerKind:
    """Returns the kind of a layer that has its pages in a block table."""
    chunked = isinstance(attention, GQA) and attention.chunk > 0
    return LayerKind(table, attention.window, attention.sink_tokens, chunked)


def rotations(spec: ModelSpec) -> set[Rotation]:
    """Returns the rotations of a model, with the dimensions of a head that they turn."""
    attentions = (group.attention for group in spec.groups)
    return {
        (attention.rope, attention.rotated)
        for attention in attentions
        if attention.rope is not None
    }


def query_scales(spec: ModelSpec) -> set[QueryScale]:
    """Returns the kinds of factors of a model's queries."""
    kinds = {group.attention.query_scale for group in spec.groups}
    return {kind for kind in kinds if kind is not None}


def rope_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Returns rotary cosines and sines, [length, 2, 1, head_dim] float32."""
    inverse = inverse_frequencies(rope, head_dim)
    # [length, head_dim / 2]
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    # Dimensions that do not turn are not scaled.
    factor = torch.where(inverse == 0, 1.0, rope.attention_factor)
    cos, sin = (component * factor for component in (angles.cos(), angles.sin()))
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table[:, :, None]


@frozen(eq=False)
class Heads:
    """The attention of one layer's heads."""

    gqa: GQA
    scale: float
    sinks: Tensor | None  # [heads] float32

    def decode(self, query: Tensor, cache: LayerCache, group: DecodeGroup) -> Tensor:
        """Attend with one query token a row: [rows, heads, head_dim] -> [rows, heads *
        head_dim].
        """
        gqa, rows = self.gqa, query.shape[0]
        key, value = self._read(cache, group.blocks, rows, group)
        shared = gqa.heads // gqa.kv_heads
        query = query.view(rows, gqa.kv_heads, shared, gqa.head_dim)
        mask = group.mask
        if self.sinks is not None:
            sinks = self.sinks.view(1, gqa.kv_heads, shared, 1)
            key, value, mask = _with_sinks(key, value, mask, sinks)
        if gqa.score_cap is None:
            out = F.scaled_dot_product_attention(
                query, key, value, mask, scale=self.scale
            )
        else:
            lines = query.unsqueeze(-2), key, value
            of_lines = None if mask is None else mask.unsqueeze(-2)
            out = capped_attention(*lines, of_lines, self.scale, gqa.score_cap)
        return out.reshape(rows, gqa.q_size)

    def _read(
        self,
        cache: LayerCache,
        blocks: Tensor | slice,
        rows: int,
        reads: DecodeGroup | ChunkReads,
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that each row reads, each [rows, kv_heads, context
        - skip, head_dim].
        """
        shape = (rows, -1, 2, self.gqa.kv_heads, self.gqa.head_dim)
        kv = cache.read(blocks).view(shape)[:, reads.skip : reads.context]
        key, value = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return key, value

    def prefill(
        self,
        query: Tensor,
        new: Tensor,
        cache: LayerCache,
        chunk: ChunkReads,
        out: Tensor,
    ) -> None:
        """Attend with the tokens of one chunk: `query` [n, heads, head_dim], whose own
        keys and values are `new` [n, 2, kv_heads, head_dim], into `out` [n, heads *
        head_dim].
        """
        gqa, count = self.gqa, len(query)
        shared = gqa.heads // gqa.kv_heads
        if chunk.blocks is None:
            key, value = new[None].permute(2, 0, 3, 1, 4).unbind(0)
        else:
            key, value = self._read(cache, chunk.blocks, 1, chunk)
        # [kv_heads, group, n, head_dim]: the key head is the batch, so expanding it
        # copies nothing.
        query = query.view(count, gqa.kv_heads, shared, gqa.head_dim).permute(1, 2, 0, 3)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        out_by_head = out.view(count, gqa.kv_heads, shared, gqa.head_dim).permute(
            1, 2, 0, 3
        )
        mergeable = self.sinks is None and gqa.score_cap is None
        if mergeable and chunk.is_causal and query.dtype in MERGEABLE_DTYPES:
            out_by_head.copy_(_after_context(query, key, value, self.scale))
            return
        for piece in chunk.pieces():
            out_by_head[:, :, piece.tokens] = self._piece(
                query[:, :, piece.tokens],
                key[:, :, : piece.keys],
                value[:, :, : piece.keys],
                piece.mask,
                causal=chunk.blocks is None and chunk.rule is None,
            )

    def _piece(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
    ) -> Tensor:
        """Attend with some tokens of a chunk: [kv_heads, group, n, head_dim], likewise
        keys and values of one head a group.
        """
        cap = self.gqa.score_cap
        if causal and (self.sinks is not None or cap is not None):
            count = query.shape[2]
            mask = torch.full((count, count), -torch.inf).triu_(1)
            causal = False
        if self.sinks is not None:
            sinks = self.sinks.view(len(query), query.shape[1], 1, 1)
            key, value, mask = _with_sinks(key, value, mask, sinks)
        if cap is not None:
            shared = key[:, 0], value[:, 0]
            return capped_attention(query, *shared, mask, self.scale, cap)
        shape = (*query.shape[:2], *key.shape[2:])
        return F.scaled_dot_product_attention(
            query,
            key.expand(shape),
            value.expand(shape),
            mask,
            scale=self.scale,
            is_causal=causal,
        )


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float,
) -> Tensor:
    """Returns attention whose scores are cap * tanh(score / cap) before the mask is
    added: a few queries after others, so that scores are few numbers.

    `query` [..., group, n, head_dim], keys and values [..., keys, head_dim], and a mask
    for [..., group, n, keys].
    """
    heads, keys = query.shape[:-2], key.shape[-2]
    size = max(1, MAX_MASK_NUMBERS // (heads.numel() * keys))
    results, start = [], 0
    for piece in torch.split(query * (scale / cap), size, -2):
        end = start + piece.shape[-2]
        scores = torch.matmul(piece.flatten(-3, -2), key.transpose(-1, -2))
        scores = scores.float().tanh_().mul_(cap).view(*heads, end - start, keys)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., start:end, :]
        weights = scores.softmax(-1).to(value.dtype).flatten(-3, -2)
        results.append(torch.matmul(weights, value).view(piece.shape))
        start = end
    return results[0] if len(results) == 1 else torch.cat(results, -2)


def _after_context(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Returns the attention of the last tokens of a context, without a mask: over the
    keys before theirs, all of which they see, and causally over their own, the two
    weighted by their sums of exponentials.

    `query` [kv_heads, group, n, head_dim], keys and values of one head a group.
    """
    count = query.shape[2]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    results = []
    for span, causal in ((slice(None, -count), False), (slice(-count, None), True)):
        shape = (*query.shape[:2], *key[:, :, span].shape[2:])
        keys, values = (tensor[:, :, span].expand(shape) for tensor in (key, value))
        results.append(attend(query, keys, values, 0.0, causal, scale=scale))
    (earlier, earlier_sum), (chunk, chunk_sum) = results
    share = torch.sigmoid(earlier_sum - chunk_sum).unsqueeze(-1)
    return torch.lerp(chunk.float(), earlier.float(), share).to(query.dtype)


def _with_sinks(
    key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys, values and mask with one more key of zeros, whose score is the sink
    and whose value is zero.

    `sinks` and `mask` have a query's head, or 1, and 1 query, or each, in their last
    dimensions but one.
    """
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    if mask is None:
        mask = sinks.new_zeros(1, key.shape[-2] - 1)
    lead = (mask[..., 0] + sinks[..., 0]).shape
    masks = (mask.expand(*lead, mask.shape[-1]), sinks.expand(*lead, 1))
    return key, value, torch.cat(masks, -1).to(key.dtype)
