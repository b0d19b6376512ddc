"""The contexts of long prefill chunks, dequantized into a workspace in the model's dtype.

Theory. `prefill_attention` converts every tile of a cache in 8 bits once for each 128
rows of queries, which takes longer than the products that it feeds: 8,192 queries behind
24,000 tokens take 7.3 ms over a bfloat16 cache, 9.4 with FP8 and 16.2 with INT8 (H100, 28
heads over 4 key heads of 128). For a long chunk it is cheaper to convert its context once
in each layer, and to attend over the copy. That is bound by memory: 32,000 tokens are 33
MB read and 66 MB written, some 40 us. The workspace has the blocks of all contexts of the
step in turn (`DequantizedWork`), and the block size of the cache, so that the kernels
that read a cache read it as well.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.attention_tunes import padded
from minfer.kernels.cache_numbers import CacheScales, as_bytes, dequantize
from minfer.kernels.dequantized_work import DequantizedWork


@triton.jit
def _dequantize(
    numbers,
    scales,
    out,
    source_offsets,
    scale_index,
    target_offsets,
    mask,
    dtype: tl.constexpr,
):
    """Copy a tile of numbers at `source_offsets` to `target_offsets`; their scales
    [tokens] are at `scale_index`, or None.
    """
    x = tl.load(numbers + source_offsets, mask=mask, other=0.0)
    if scales is not None:
        scale = tl.load(scales + scale_index)
        x = x.to(tl.float32) * scale[:, None]
    tl.store(out + target_offsets, x.to(dtype), mask=mask)


# `rows` and `starts` are slices of a step's, so their pointers may be unaligned.
@triton.jit(do_not_specialize_on_alignment=["rows", "starts"])
def _dequantize_contexts(
    keys,
    values,
    k_scales,
    v_scales,
    table,
    chunks,
    firsts,
    rows,
    starts,
    out_keys,
    out_values,
    table_row,
    stride_block,
    stride_token,
    stride_head,
    kv_heads,
    window: tl.constexpr,
    sink_tokens: tl.constexpr,
    block_size: tl.constexpr,
    block_pad: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
):
    """Grid [workspace blocks, kv_heads]: one head of a block's keys and values."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.load(chunks + place)
    if chunk < 0:
        return
    context_block = place - tl.load(firsts + chunk)
    if window > 0:
        # No query of the chunk reads before the window of its first one.
        first_visible = tl.load(starts + chunk) - window + 1
        if ((context_block + 1) * block_size <= first_visible) & (
            context_block * block_size >= sink_tokens
        ):
            return
    row = tl.load(rows + chunk).to(tl.int64)
    block = tl.load(table + row * table_row + context_block).to(tl.int64)
    tokens = tl.arange(0, block_pad)
    dims = tl.arange(0, dim_pad)
    mask = (tokens < block_size)[:, None] & (dims < dim)[None, :]
    source_offsets = block * stride_block + head * stride_head
    source_offsets = source_offsets + tokens[:, None] * stride_token + dims[None, :]
    scale_index = (block * block_size + tokens % block_size) * kv_heads + head
    target_index = (place.to(tl.int64) * block_size + tokens) * kv_heads + head
    target_offsets = target_index[:, None] * dim + dims[None, :]
    dtype: tl.constexpr = out_keys.dtype.element_ty
    _dequantize(
        keys, k_scales, out_keys, source_offsets, scale_index, target_offsets, mask, dtype
    )
    _dequantize(
        values,
        v_scales,
        out_values,
        source_offsets,
        scale_index,
        target_offsets,
        mask,
        dtype,
    )


def dequantize_contexts(
    work: DequantizedWork,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: CacheScales | None,
    dtype: torch.dtype,
    *,
    window: int = 0,
    sink_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns a workspace of keys and one of values, each [workspace blocks, block_size,
    kv_heads, head_dim] in `dtype`.

    keys and values are a cache in 8 bits as in `decode_attention` (attention.py), with
    its scales if it is INT8; table [max_rows, max_blocks] int32 is the cache's. Blocks
    that no query of a chunk reads, as a window ends before them and they hold no sink
    tokens, are not read, and not written to the workspace.
    """
    block_size, kv_heads, dim = keys.shape[1:]
    out = keys.new_empty((2, len(work.chunks), *keys.shape[1:]), dtype=dtype)
    if not on_triton(keys):
        _reference(work, table, (keys, values), scales, out, window, sink_tokens)
        return out[0], out[1]
    _dequantize_contexts[len(work.chunks), kv_heads](
        keys=keys,
        values=values,
        k_scales=None if scales is None else scales.keys,
        v_scales=None if scales is None else scales.values,
        table=table,
        chunks=work.chunks,
        firsts=work.firsts,
        rows=work.rows,
        starts=work.starts,
        out_keys=out[0],
        out_values=out[1],
        table_row=table.stride(0),
        stride_block=keys.stride(0),
        stride_token=keys.stride(1),
        stride_head=keys.stride(2),
        kv_heads=kv_heads,
        window=window,
        sink_tokens=sink_tokens,
        block_size=block_size,
        block_pad=triton.next_power_of_2(block_size),
        dim=dim,
        dim_pad=padded(dim),
    )
    return out[0], out[1]


def _reference(
    work: DequantizedWork,
    table: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: CacheScales | None,
    out: Tensor,
    window: int,
    sink_tokens: int,
) -> None:
    """`dequantize_contexts` in plain torch."""
    size = caches[0].shape[1]
    for place, chunk in enumerate(work.chunks.tolist()):
        index = place - int(work.firsts[chunk])
        first_visible = int(work.starts[chunk]) - window + 1 if window else 0
        unread = (index + 1) * size <= first_visible and index * size >= sink_tokens
        if chunk < 0 or unread:
            continue
        block = int(table[work.rows[chunk], index])
        for workspace, cache, scale in zip(
            out, caches, scales or (None, None), strict=True
        ):
            numbers = as_bytes(cache)[block].view(cache.dtype)
            block_scales = None if scale is None else scale[block]
            workspace[place] = dequantize(numbers, block_scales, out.dtype)
