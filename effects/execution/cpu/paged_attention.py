"""The CPU's KV cache and paged attention, in plain torch.

The cache keeps a token's keys and values side by side, so that one scatter writes both
and one gather of whole blocks reads both. Query heads that share a key head are treated
as several queries of that head, so keys are never repeated (grouped-query attention,
Ainslie et al. 2023).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import Factory, frozen
from torch import Tensor

from minfer.effects.execution.cpu.attention_reads import (
    ChunkReads,
    DecodeGroup,
    plan_reads,
)
from minfer.effects.models.batch import Batch
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.gqa import GQA
from minfer.effects.models.rope_scaling import inverse_frequencies
from minfer.effects.models.spec import ModelSpec
from minfer.kernels.plain import rms_norm
from minfer.records.plan import Copy


@frozen(eq=False)
class KVCache:
    """Keys and values of all layers in blocks; `slots` and `blocks` are views
    of `data`.
    """

    spec: ModelSpec
    data: Tensor  # [layers, blocks, block_size, 2, kv_heads, head_dim]
    slots: tuple[Tensor, ...]  # a layer: [blocks * block_size, 2 * kv_heads, head_dim]
    blocks: tuple[Tensor, ...]  # a layer: [blocks, block_size * 2 * kv_heads * head_dim]
    # [positions, 2, 1, head_dim] float32: cosines, sines signed for `rotate`
    rope: Tensor
    step: list[Any] = Factory(list)  # the last batch, its reads, and cosines and sines

    def mix(
        self,
        batch: Batch,
        index: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """Norm and rotate heads, then `attend`; see `PagedCache` in models/cache.py."""
        gqa, eps = self.spec.layers[index].attention, self.spec.rms_norm_eps
        heads = qkv.view(qkv.shape[0], -1, gqa.head_dim)
        if q_norm is not None and k_norm is not None:
            query, key = heads[:, : gqa.heads], heads[:, gqa.heads : -gqa.kv_heads]
            rms_norm(query, q_norm, eps, out=query)
            rms_norm(key, k_norm, eps, out=key)
        rotate(heads[:, : -gqa.kv_heads], *self._prepared(batch)[2:])
        return self.attend(batch, index, qkv)

    def attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None = None
    ) -> Tensor:
        """Write keys and values, and attend; see `PagedCache` in models/cache.py."""
        if qkv.dtype is self.data.dtype:
            return self._attend(batch, index, qkv, scale)
        found = self._attend(batch, index, qkv.to(self.data.dtype), scale)
        return found.to(qkv.dtype)

    def _attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None
    ) -> Tensor:
        """Write keys and values, and attend, in the cache's dtype."""
        gqa = self.spec.layers[index].attention
        reads, blocks = self._prepared(batch)[1][gqa.window], self.blocks[index]
        qkv = qkv.view(qkv.shape[0], -1, gqa.head_dim)
        queries = qkv[:, : gqa.heads]
        if batch.verified is not None:
            # A rejected draft leaves keys and values that its row later reads as padding.
            decode_rows = len(batch.rows)
            guessed = qkv[batch.verified.decode_rows : decode_rows, gqa.heads :]
            torch.nan_to_num(guessed, 0.0, 0.0, 0.0, out=guessed)
        self.slots[index].index_copy_(0, batch.slots, qkv[:, gqa.heads :])
        if not reads.chunks and reads.groups[0].rows is None:
            return _decode(gqa, queries, blocks, reads.groups[0], scale)
        decode_rows = batch.rows.shape[0]
        out = qkv.new_empty(qkv.shape[0], gqa.q_size)
        for group in reads.groups:
            if group.rows is None:
                out[:decode_rows] = _decode(
                    gqa, queries[:decode_rows], blocks, group, scale
                )
            else:
                picked = queries.index_select(0, group.rows)
                out.index_copy_(0, group.rows, _decode(gqa, picked, blocks, group, scale))
        for chunk in reads.chunks:
            where = slice(chunk.first, chunk.last)
            _prefill(gqa, qkv[where], blocks, chunk, scale, out[where])
        return out

    def _prepared(self, batch: Batch) -> list[Any]:
        if not self.step or self.step[0] is not batch:
            block_size = self.data.shape[2]
            reads = plan_reads(batch, block_size, tuple(dict.fromkeys(self.spec.windows)))
            angles = (
                self.rope.index_select(0, batch.positions).unbind(1)
                if len(self.rope)
                else ()
            )
            self.step[:] = batch, reads, *angles
        return self.step

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy positions of blocks, in all layers."""
        for one in copies:
            self.data[:, one.target, : one.count] = self.data[:, one.source, : one.count]

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Zero newly allocated blocks of a row, the first of them from slot `start` on.

        Attention reads padding with weight 0. If the previous owner's numbers
        overflowed, that would be 0 * NaN, and the new owner would fail.
        """
        if start and blocks:
            self.data[:, blocks[0], start:] = 0
            blocks = blocks[1:]
        if blocks:
            self.data.index_fill_(1, torch.tensor(blocks), 0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place: `x` [tokens, heads, head_dim], `cos` and `sin` [tokens, 1,
    head_dim].

    `sin` is negative for the first half of a head, so rotating halves is a roll. Computed
    in float32 whatever the dtype of `x`.
    """
    turned = x.roll(x.shape[-1] // 2, -1)
    if x.dtype is torch.float32:
        x.mul_(cos).addcmul_(turned, sin)
    else:
        x.copy_((x * cos).addcmul_(turned.float(), sin))


def make_cache(
    spec: ModelSpec,
    blocks: int,
    block_size: int,
    dtype: str | None = None,
    max_model_len: int | None = None,
) -> KVCache:
    """Returns a zeroed cache of `blocks` blocks of `block_size` tokens, in the spec's KV
    dtype when `dtype` is None.

    It is zeroed, as masked slots still enter the products with weight 0. The rotary table
    covers every position below `max_model_len` (the model's own limit when None) that the
    pool could hold; with windows in all layers, sequences can be longer than the pool.
    """
    [token] = {group.attention.kv_shape for group in spec.groups}
    layers = len(spec.layers)
    shape = (layers, blocks, block_size, *token)
    kind = torch_dtype(dtype or spec.kv_dtype)
    # Memory from the kernel's zero pages, touched when written: torch.zeros would fill it
    # now.
    data = (
        torch.from_numpy(np.zeros(prod(shape) * kind.itemsize, np.uint8))
        .view(kind)
        .view(shape)
    )
    slots = data.view(layers, blocks * block_size, 2 * spec.kv_heads, spec.head_dim)
    rows = data.view(layers, blocks, -1)
    length = max_model_len or spec.max_position_embeddings
    if None in spec.windows:
        length = min(length, blocks * block_size)
    return KVCache(spec, data, slots.unbind(0), rows.unbind(0), rope_table(spec, length))


def rope_table(spec: ModelSpec, length: int) -> Tensor:
    """Rotary cosines and sines, [length, 2, 1, head_dim] float32; empty for models
    without.
    """
    if spec.rope is None:
        return torch.empty(0, 2, 1, spec.head_dim)
    inverse = inverse_frequencies(spec.rope, spec.head_dim)
    # [length, head_dim / 2]
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    cos, sin = (
        part * spec.rope.attention_factor for part in (angles.cos(), angles.sin())
    )
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table[:, :, None]


def _decode(
    gqa: GQA,
    query: Tensor,
    blocks: Tensor,
    group: DecodeGroup,
    scale: float | None,
) -> Tensor:
    """One query token a row: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
    rows = query.shape[0]
    key, value = _read(gqa, blocks, group.blocks, rows, group)
    query = query.view(rows, gqa.kv_heads, gqa.heads // gqa.kv_heads, gqa.head_dim)
    out = F.scaled_dot_product_attention(query, key, value, group.mask, scale=scale)
    return out.reshape(rows, gqa.q_size)


def _read(
    gqa: GQA,
    blocks: Tensor,
    which: Tensor | slice,
    rows: int,
    part: DecodeGroup | ChunkReads,
) -> tuple[Tensor, Tensor]:
    """Keys and values that each row reads, each [rows, kv_heads, context - skip,
    head_dim].
    """
    found = blocks[which] if isinstance(which, slice) else blocks.index_select(0, which)
    kv = found.view(rows, -1, 2, gqa.kv_heads, gqa.head_dim)[:, part.skip : part.context]
    key, value = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return key, value


def _prefill(
    gqa: GQA,
    qkv: Tensor,
    blocks: Tensor,
    chunk: ChunkReads,
    scale: float | None,
    out: Tensor,
) -> None:
    """One chunk: `qkv` [n, heads + 2 * kv_heads, head_dim] into `out` [n, heads *
    head_dim].
    """
    count, shared = len(qkv), gqa.heads // gqa.kv_heads
    if chunk.blocks is None:
        kv = qkv[:, gqa.heads :].view(1, count, 2, gqa.kv_heads, gqa.head_dim)
        key, value = kv.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        key, value = _read(gqa, blocks, chunk.blocks, 1, chunk)
    # [kv_heads, group, n, head_dim]: the key head is the batch, so expanding it copies
    # nothing.
    shape = (gqa.kv_heads, shared, chunk.context - chunk.skip, gqa.head_dim)
    query = qkv[:, : gqa.heads].view(count, gqa.kv_heads, shared, gqa.head_dim)
    result = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        chunk.mask,
        scale=scale,
        is_causal=chunk.blocks is None and chunk.mask is None,
    )
    out.view(count, gqa.kv_heads, shared, gqa.head_dim).copy_(result.permute(2, 0, 1, 3))
