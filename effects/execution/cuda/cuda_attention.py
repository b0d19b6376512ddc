"""A GPU's KV cache: what a model's layers do with a packed step between two matrix
products.

Nothing here waits for the device or reads a tensor's values, so steps can be captured.
Without a GPU the kernels' references run.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import (
    Rotation,
    heads_of,
    latents_of,
    placed,
    query_scales,
    rope_table,
    rotations,
    slot_shape,
)
from minfer.effects.execution.cuda.latent_attention import LatentLayer
from minfer.effects.execution.cuda.step_segments import (
    DecodeSegment,
    decode_segments,
    prefill_segments,
)
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
from minfer.effects.models.architecture.rope_scaling import Rope
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import torch_dtype, torch_kv_dtype
from minfer.effects.models.layout.cache_layout import CacheLayout
from minfer.kernels.attention import decode_attention, prefill_attention
from minfer.kernels.cache_numbers import CacheScales, write
from minfer.kernels.dequantized_contexts import dequantize_contexts
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.flash import flash_attention
from minfer.kernels.latent_cache import write_latent
from minfer.kernels.leaves import HeadWeights, LatentWeights
from minfer.kernels.page_copy import copy_pages
from minfer.kernels.rope import rope_and_cache
from minfer.records.plan import Copy

BLOCKS_PER_COPY: Final = 16  # blocks that are copied through one buffer: 57 MB for a 7B
PAGE_DIM: Final = 2  # of keys and values, or latents, of all layers


class _Options(TypedDict):
    """What both kernels of attention take."""

    window: int
    chunked: bool
    sink_tokens: int
    sinks: Tensor | None
    scales: CacheScales | None
    cap: float | None
    splits: int
    out: Tensor


class _Pages(NamedTuple):
    """What attention reads: keys and values [blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor
    table: Tensor  # [rows, max_blocks] int32
    scales: CacheScales | None


@frozen(eq=False)
class CudaCache:
    """Keys and values in blocks, separate for each layer; more pages than the engine
    knows of.

    The page after those of the engine, and those of a state behind it, are for padding
    rows: what they write is never read.
    """

    spec: ModelSpec
    layout: CacheLayout
    # Its numbers are [layers of a page, 2, all pages, block_size, kv_heads, head_dim],
    # keys and values; or, of latents, [layers of a page, 1, all pages, block_size,
    # latent_dim].
    memory: CacheMemory
    # Of each layer with attention, by its index: [all pages, block_size, ...]
    layers: Mapping[int, tuple[Tensor, ...]]
    layer_scales: Mapping[int, CacheScales]  # likewise, if there are any
    groups: Mapping[int, int]  # likewise, as in `ModelSpec.groups`
    # [positions, head_dim] float32 by rotation: cosines, then sines
    ropes: Mapping[Rotation, Tensor]
    query_scales: Mapping[QueryScale, Tensor]  # [positions] float32

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        layout: CacheLayout,
        pages: int,
        block_size: int,
        length: int,
        device: torch.device,
    ) -> "CudaCache":
        """Returns pages on a device, for positions up to `length`.
        torch.OutOfMemoryError.
        """
        pages += 1 + layout.state_pages
        shape = (layout.layers_a_page, *_slot_shape(spec, pages, block_size))

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        dtype = torch_kv_dtype(spec.kv_dtype)
        memory = CacheMemory.allocate(shape, PAGE_DIM, dtype, layout, allocate)
        numbers, scales = memory.numbers, memory.scales
        ropes = {
            (rope, dim): _angles(rope, dim, length).to(device)
            for rope, dim in rotations(spec)
        }
        layers, of_layers, groups = {}, {}, {}
        kinds = [group.attention for group in spec.groups]
        for index, place, attention in placed(spec, layout):
            layers[index] = _stored(numbers[place.slot], place.share, attention)
            groups[index] = kinds.index(attention)
            if scales is not None:
                of_layers[index] = CacheScales(*scales[place.slot])
        factors = {
            query_scale: query_scale.table(length + 1).to(device)
            for query_scale in query_scales(spec)
        }
        return cls(spec, layout, memory, layers, of_layers, groups, ropes, factors)

    def rotate_and_attend(
        self, batch: Batch, index: int, qkv: Tensor, heads: HeadWeights
    ) -> Tensor:
        """Norm and rotate heads, write keys and values, attend; see `PagedCache` in
        models/architecture/cache.py.
        """
        gqa, (keys, values) = heads_of(self.spec, index), self.layers[index]
        if gqa.rope is None:
            raise TypeError("transformers' model rotates heads itself")
        qkv = padded_values(gqa, qkv)
        rope_and_cache(
            qkv,
            self.ropes[gqa.rope, gqa.rotated],
            batch.positions,
            batch.slots[self.layout.place(index).table],
            keys,
            values,
            gqa.heads,
            gqa.new_kv_heads,
            heads.q_norm,
            heads.q_norm if heads.k_norm is None else heads.k_norm,
            self.layer_scales.get(index),
            heads.v_norm,
            norms_last=heads.norms_after_rope,
            query_scales=self._query_scales(gqa),
            keys_are_values=gqa.keys_are_values,
        )
        attended = self._read(batch, index, qkv, gqa.scale, heads.sinks)
        return without_padding(gqa, attended)

    def mix_latent(
        self,
        batch: Batch,
        index: int,
        query: Tensor,
        latent: Tensor,
        weights: LatentWeights,
    ) -> Tensor:
        """Norm and rotate, write latents, and attend; see `PagedCache`."""
        mla, [cache] = latents_of(self.spec, index), self.layers[index]
        table = self.layout.place(index).table
        rope = self.ropes[mla.rope, mla.rotated]
        splits = batch.splits_of(self.groups[index])
        factors = self._query_scales(mla)
        layer = LatentLayer(mla, cache, table, rope, weights, splits, factors)
        return layer.rotate_and_attend(batch, query, latent)

    def store(self, batch: Batch, index: int, kv: Tensor, heads: HeadWeights) -> None:
        """Norm and rotate keys, write keys and values; see `PagedCache`."""
        gqa = evolve(heads_of(self.spec, index), heads=0)
        if gqa.rope is None:
            raise TypeError("transformers' model rotates heads itself")
        (keys, values), k_norm = self.layers[index], heads.k_norm
        rope_and_cache(
            padded_values(gqa, kv),
            self.ropes[gqa.rope, gqa.rotated],
            batch.positions,
            batch.slots[self.layout.place(index).table],
            keys,
            values,
            0,
            gqa.new_kv_heads,
            k_norm,
            k_norm,
            self.layer_scales.get(index),
            heads.v_norm,
            norms_last=heads.norms_after_rope,
            keys_are_values=gqa.keys_are_values,
        )

    def store_latent(
        self, batch: Batch, index: int, latent: Tensor, weights: LatentWeights
    ) -> None:
        """Norm, rotate and write latents; see `PagedCache`."""
        mla, [cache] = latents_of(self.spec, index), self.layers[index]
        write_latent(
            latent,
            weights.norm,
            self.ropes[mla.rope, mla.rotated],
            batch.positions,
            batch.slots[self.layout.place(index).table],
            cache,
            no_queries := latent.new_empty(len(latent), 1, mla.rope_dim),
            out=no_queries,
            interleaved=False,
        )

    def attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None = None
    ) -> Tensor:
        """Write keys and values, and attend; see `PagedCache`."""
        gqa = heads_of(self.spec, index)
        if self.memory.numbers.itemsize > 1:
            qkv = qkv.to(self.memory.numbers.dtype)
        heads = qkv.view(len(qkv), -1, gqa.head_dim)
        new_keys_values = heads[:, gqa.heads :].chunk(2, 1)
        slots = batch.slots[self.layout.place(index).table]
        scales = self.layer_scales.get(index) or (None, None)
        for cache, number_scales, new in zip(
            self.layers[index], scales, new_keys_values, strict=True
        ):
            write(cache, number_scales, slots, new)
        return self._read(batch, index, qkv, gqa.scale if scale is None else scale)

    def _read(
        self,
        batch: Batch,
        index: int,
        qkv: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of rotated queries, whose keys and values are in the
        cache.
        """
        gqa, group = heads_of(self.spec, index), self.groups[index]
        place, cached = self.layout.place(index), self._pages(batch, index)
        q = qkv.view(len(qkv), -1, gqa.head_dim)[:, : gqa.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        segments = [
            (segment, cached)
            for segment in decode_segments(batch, batch.splits_of(group))
        ]
        if (chunks := batch.chunks) is not None:
            of_chunks = cached
            if chunks.dequantized is not None:
                of_chunks = self._dequantized(chunks.dequantized, cached, gqa)
            if work := chunks.flash_of(group):
                chunk_tokens = slice(len(batch.rows), len(q))
                keys, values = of_chunks[:2]
                flash_attention(
                    work,
                    place.table,
                    q[chunk_tokens],
                    keys,
                    values,
                    scale,
                    out[chunk_tokens],
                )
            else:
                segments += [(segment, of_chunks) for segment in prefill_segments(batch)]
        for segment, pages in segments:
            args = q[segment.tokens], pages.keys, pages.values, pages.table, segment.rows
            options: _Options = {
                "window": gqa.window or 0,
                "chunked": gqa.chunk > 0,
                "sink_tokens": gqa.sink_tokens,
                "sinks": sinks,
                "scales": pages.scales,
                "cap": gqa.score_cap,
                "splits": segment.splits,
                "out": out[segment.tokens],
            }
            if isinstance(segment, DecodeSegment):
                decode_attention(*args, segment.contexts, scale, **options)
                continue
            prefill_attention(
                *args,
                segment.starts,
                segment.counts,
                segment.offsets,
                scale,
                max_count=segment.max_count,
                draft_layout=segment.draft_layout,
                **options,
            )
        return out.view(len(out), -1)

    def _query_scales(self, attention: Attention) -> Tensor | None:
        """Returns the factors of a layer's queries by position, if there are any."""
        kind = attention.query_scale
        return None if kind is None else self.query_scales[kind]

    def _pages(self, batch: Batch, index: int) -> _Pages:
        """Returns a layer's cache."""
        keys, values = self.layers[index]
        table = batch.table[self.layout.place(index).table]
        return _Pages(keys, values, table, self.layer_scales.get(index))

    def _dequantized(self, work: DequantizedWork, cached: _Pages, gqa: GQA) -> _Pages:
        """Returns the contexts of the step's chunks in the model's dtype."""
        keys, values = dequantize_contexts(
            work,
            cached.table,
            cached.keys,
            cached.values,
            cached.scales,
            torch_dtype(self.spec.dtype),
            window=gqa.window or 0,
            sink_tokens=gqa.sink_tokens,
        )
        return _Pages(keys, values, work.table, None)

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
        """Copy pages: `BLOCKS_PER_COPY` of them by two launches, or beside recurrent
        layers all by one. Whole blocks are copied: no kernel reads behind a context.
        """
        if self.layout.states is not None:
            pairs = [[page.source, page.target] for page in copies]
            on_device = self._to_device(pairs)
            copy_pages(self.data, on_device)
            if self.memory.scales is not None:
                scales = self.memory.scales.movedim(PAGE_DIM, 0)
                scales[on_device[:, 1]] = scales[on_device[:, 0]]
            return
        for first in range(0, len(copies), BLOCKS_PER_COPY):
            batch = copies[first : first + BLOCKS_PER_COPY]
            blocks = [
                [block_copy.source for block_copy in batch],
                [block_copy.target for block_copy in batch],
            ]
            sources, targets = self._to_device(blocks)
            for view in self.page_views():
                view.index_copy_(0, targets, view.index_select(0, sources))

    def _to_device(self, pages: list[list[int]]) -> Tensor:
        """Returns page ids on the device, without waiting."""
        pinned = torch.tensor(pages, pin_memory=self.data.is_cuda)
        return pinned.to(self.data.device, non_blocking=True)

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Do nothing: no kernel's result depends on what is behind a context."""


def _slot_shape(spec: ModelSpec, pages: int, block_size: int) -> tuple[int, ...]:
    """Returns the shape of a place for a layer: keys and values apart, or latents."""
    shape = slot_shape(spec)
    if len(shape) > 1:
        return (shape[0], pages, block_size, *shape[1:])
    if all(isinstance(group.attention, GQA) for group in spec.groups):
        return (2, pages, block_size, shape[0] // 2)  # of layers that share places
    return (1, pages, block_size, *shape)


def _stored(data: Tensor, share: int, attention: GQA | MLA) -> tuple[Tensor, ...]:
    """Returns keys and values of a layer, or latents, in its place [tensors, pages,
    block_size, ...]. Where several layers share one, each has both in one half of it.
    """
    if data.dim() > 4 or not isinstance(attention, GQA):
        return data.unbind(0)
    size, first = attention.kv_elements // 2, 0
    halves = data[0], data[1]
    if attention.layers_a_slot > 1:
        half, place = divmod(share, attention.layers_a_slot // 2)
        tokens, first = data[half], place * 2 * size
        halves = tokens, tokens[..., size:]
    parts = (half_slot[..., first : first + size] for half_slot in halves)
    heads = attention.kv_shape[1:]
    return tuple(part.view(*part.shape[:-1], *heads) for part in parts)


def _angles(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Returns cosines, then sines [length + 1, head_dim] of positions."""
    half = head_dim // 2
    table = rope_table(rope, head_dim, length + 1)[:, :, 0]  # [positions, 2, head_dim]
    return torch.cat((table[:, 0, :half], table[:, 1, half:]), -1).contiguous()
