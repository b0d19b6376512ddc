"""Paged attention in plain torch: the CPU's, and the reference for every kernel.

The cache keeps a token's keys and values side by side, so that one scatter writes both and one
gather of whole blocks reads both. Query heads that share a key head are treated as several
queries of that head, so keys are never repeated (grouped-query attention, Ainslie et al. 2023).
"""

from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from minfer.effects.batch import Batch, Chunk, DecodeGroup
from minfer.effects.rope import inverse_frequencies
from minfer.effects.spec import ModelSpec
from minfer.effects.weights import torch_dtype


@frozen(eq=False)
class KVCache:
    """Keys and values of all layers in blocks; `slots` and `blocks` are views of `data`.

    Copying block a to b in all layers is `data[:, b] = data[:, a]`.
    """

    data: Tensor  # [layers, blocks, block_size, 2, kv_heads, head_dim]
    slots: tuple[Tensor, ...]  # a layer: [blocks * block_size, 2 * kv_heads, head_dim]
    blocks: tuple[Tensor, ...]  # a layer: [blocks, block_size * 2 * kv_heads * head_dim]
    rope: Tensor  # [positions, 2, 1, head_dim] float32: cosines, sines signed for `rotate`


def make_cache(
    spec: ModelSpec,
    blocks: int,
    block_size: int,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
) -> KVCache:
    """A zeroed cache of `blocks` blocks of `block_size` tokens.

    Zeroed, as masked slots still enter the products with weight 0. The rotary table covers every
    position below `max_model_len` (the model's own limit when None) that the pool could hold; with
    windows in all layers, sequences can be longer than the pool.
    """
    shape = (spec.layers, blocks, block_size, 2, spec.kv_heads, spec.head_dim)
    kind = torch_dtype(dtype or spec.dtype)
    if torch.device(device).type == "cpu":
        # From the kernel's zero pages, touched when written: torch.zeros would fill them all now.
        raw = np.zeros(prod(shape) * kind.itemsize, np.uint8)
        data = torch.from_numpy(raw).view(kind).view(shape)
    else:
        data = torch.zeros(shape, dtype=kind, device=device)
    slots = data.view(spec.layers, blocks * block_size, 2 * spec.kv_heads, spec.head_dim)
    rows = data.view(spec.layers, blocks, -1)
    length = max_model_len or spec.max_position_embeddings
    if None in spec.windows:
        length = min(length, blocks * block_size)
    return KVCache(data, slots.unbind(0), rows.unbind(0), rope_table(spec, length, device))


def rope_table(spec: ModelSpec, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Rotary cosines and sines, [length, 2, 1, head_dim] float32; empty for models without."""
    if spec.rope is None:
        return torch.empty(0, 2, 1, spec.head_dim, device=device)
    inverse = inverse_frequencies(spec.rope, spec.head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse  # [length, head_dim / 2]
    cos, sin = (part * spec.rope.attention_factor for part in (angles.cos(), angles.sin()))
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table[:, :, None].to(device)


def attend(
    spec: ModelSpec,
    qkv: Tensor,
    layer: int,
    cache: KVCache,
    batch: Batch,
    scale: float | None = None,
) -> Tensor:
    """Attention of every packed token over its own context, within the layer's window.

    `qkv` is [tokens, heads + 2 * kv_heads, head_dim], rotated, its keys and values already in the
    cache. `scale` multiplies the scores; None is head_dim ** -0.5. Returns
    [tokens, heads * head_dim].
    """
    reads, blocks = batch.reads[spec.windows[layer]], cache.blocks[layer]
    groups, chunks = reads.groups, reads.chunks
    if not chunks and groups[0].rows is None:
        return _decode(spec, qkv[:, : spec.heads], blocks, groups[0], scale)
    out = qkv.new_empty(len(qkv), spec.heads * spec.head_dim)
    for group in groups:
        if group.rows is None:
            part = _decode(spec, qkv[: batch.decode, : spec.heads], blocks, group, scale)
            out[: batch.decode] = part
        else:
            query = qkv[:, : spec.heads].index_select(0, group.rows)
            out.index_copy_(0, group.rows, _decode(spec, query, blocks, group, scale))
    for chunk in chunks:
        where = slice(chunk.first, chunk.last)
        _prefill(spec, qkv[where], blocks, chunk, scale, out[where])
    return out


def _decode(
    spec: ModelSpec, query: Tensor, blocks: Tensor, group: DecodeGroup, scale: float | None
) -> Tensor:
    """One query token a row: [rows, heads, head_dim] -> [rows, heads * head_dim]."""
    rows = len(query)
    key, value = _read(spec, blocks, group.blocks, rows, group)
    query = query.view(rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
    out = F.scaled_dot_product_attention(query, key, value, group.mask, scale=scale)
    return out.reshape(rows, spec.heads * spec.head_dim)


def _read(
    spec: ModelSpec, blocks: Tensor, which: Tensor | slice, rows: int, part: DecodeGroup | Chunk
) -> tuple[Tensor, Tensor]:
    """Keys and values that each row reads, each [rows, kv_heads, context - skip, head_dim]."""
    found = blocks[which] if isinstance(which, slice) else blocks.index_select(0, which)
    kv = found.view(rows, -1, 2, spec.kv_heads, spec.head_dim)[:, part.skip : part.context]
    key, value = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return key, value


def _prefill(
    spec: ModelSpec, qkv: Tensor, blocks: Tensor, chunk: Chunk, scale: float | None, out: Tensor
) -> None:
    """One chunk: `qkv` [n, heads + 2 * kv_heads, head_dim] into `out` [n, heads * head_dim]."""
    count, shared = len(qkv), spec.heads // spec.kv_heads
    if chunk.blocks is None:
        kv = qkv[:, spec.heads :].view(1, count, 2, spec.kv_heads, spec.head_dim)
        key, value = kv.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        key, value = _read(spec, blocks, chunk.blocks, 1, chunk)
    # [kv_heads, group, n, head_dim]: the key head is the batch, so expanding it copies nothing.
    shape = (spec.kv_heads, shared, chunk.context - chunk.skip, spec.head_dim)
    query = qkv[:, : spec.heads].view(count, spec.kv_heads, shared, spec.head_dim)
    result = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        chunk.mask,
        is_causal=chunk.blocks is None and chunk.mask is None,
        scale=scale,
    )
    out.view(count, spec.kv_heads, shared, spec.head_dim).copy_(result.permute(2, 0, 1, 3))
