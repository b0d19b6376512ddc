"""All operations between the QKV projection and attention, in one launch: QK-norm, RoPE,
and the write of keys and values to the cache.

Bound by memory: 4,096 tokens of 36 heads of 128 in 2 bytes are 75 MB in all, 18 us at 4.2
TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.cache_numbers import CacheScales, write
from minfer.kernels.eight_bit_kernels import int8_scale, quantize_int8, saturated
from minfer.kernels.leaves import Norm
from minfer.kernels.norm import normalise
from minfer.kernels.pdl import early, follow

# Of 4 heads of 128 dimensions a thread loads 16 bytes.
HEADS_PER_PROGRAM = (4, 2, 1)
MIN_SHARED_PROGRAM_TOKENS = 512  # from which on a program has several tokens
TOKENS_PER_PROGRAM = 8  # from that many on; one below
NO_SLOT = tl.constexpr(1 << 60)  # above all slots


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    qkv,
    stride,
    table,
    positions,
    slots,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    stride_block,
    stride_token,
    q_norm,
    k_norm,
    v_norm,
    query_scales,
    eps,
    heads,
    kv_heads,
    tokens,
    half: tl.constexpr,
    pad: tl.constexpr,
    normed: tl.constexpr,
    norms_last: tl.constexpr,
    norm_stride: tl.constexpr,
    centered: tl.constexpr,
    keys_are_values: tl.constexpr,
    block_size: tl.constexpr,
    height: tl.constexpr,
    shared: tl.constexpr,
):
    """Grid [tokens / shared, heads / height], heads of queries, keys and values: the rows
    of a program are `height` heads of each of `shared` tokens.
    """
    row = tl.arange(0, height * shared)
    head = tl.program_id(1) * height
    token = (tl.program_id(0) * shared + row // height).to(tl.int64)
    # The same for all heads of a program.
    query = head < heads
    value = head >= heads + kv_heads
    lane = tl.arange(0, pad)[None, :]
    row_mask = token < tokens
    mask = (lane < half) & row_mask[:, None]
    inner = (row % height)[:, None] * (2 * half) + lane
    source = head
    if keys_are_values:
        source = tl.where(value, head - kv_heads, head)
    qkv_pointers = qkv + token[:, None] * stride + source * (2 * half) + inner
    if normed:
        weight = tl.where(query, q_norm, k_norm)
        if v_norm is not None:
            weight = tl.where(value, v_norm, weight)
        weight += lane
        if norm_stride:  # each head has its own factors
            first_head = tl.where(value, 0, head - tl.where(query, 0, heads))
            weight += (first_head + row % height)[:, None] * norm_stride
        low_norm = tl.load(weight, mask=lane < half, other=0.0)
        high_norm = tl.load(weight + half, mask=lane < half, other=0.0)
    follow()
    left = tl.load(qkv_pointers, mask=mask, other=0.0)
    right = tl.load(qkv_pointers + half, mask=mask, other=0.0)
    first = left.to(tl.float32)
    second = right.to(tl.float32)
    if normed and not norms_last:
        first, second = _normalised(
            first, second, low_norm, high_norm, eps, mask, half, left.dtype, centered
        )
    place = tl.load(positions + token, mask=row_mask, other=0).to(tl.int64)
    angle = table + place[:, None] * (2 * half) + lane
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + half, mask=mask, other=0.0)
    turned_low = first * cos - second * sin
    turned_high = second * cos + first * sin
    if normed and norms_last:
        turned_low, turned_high = _normalised(
            turned_low.to(left.dtype).to(tl.float32),
            turned_high.to(left.dtype).to(tl.float32),
            low_norm,
            high_norm,
            eps,
            mask,
            half,
            left.dtype,
            centered,
        )
    if v_norm is None:
        first = left.to(tl.float32)
        second = right.to(tl.float32)
    low = tl.where(value, first, turned_low)
    high = tl.where(value, second, turned_high)
    if query_scales is not None:
        query_scale = tl.load(query_scales + place, mask=row_mask, other=1.0)
        query_scale = tl.where(query, query_scale, 1.0)[:, None]
        low *= query_scale
        high *= query_scale
    slot = tl.load(slots + token, mask=row_mask, other=-1).to(tl.int64)[:, None]
    number = head - heads - tl.where(value, kv_heads, 0)
    slot_offset = slot // block_size * stride_block + slot % block_size * stride_token
    cache = tl.where(value, v_cache, k_cache) + slot_offset + number * (2 * half) + inner
    stop = tl.where(query | (slot >= 0), half, 0)
    if k_cache.dtype.element_ty == qkv.dtype.element_ty:
        out_pointers = tl.where(query, qkv_pointers, cache)
        tl.store(out_pointers, low, mask=mask & (lane < stop))
        tl.store(out_pointers + half, high, mask=mask & (lane < stop))
    else:
        query_mask = mask & (lane < tl.where(query, half, 0))
        tl.store(qkv_pointers, low, mask=query_mask)
        tl.store(qkv_pointers + half, high, mask=query_mask)
        cache_mask = mask & (lane < tl.where(query, 0, stop))
        low = low.to(left.dtype).to(tl.float32)
        high = high.to(left.dtype).to(tl.float32)
        if k_scales is None:
            tl.store(cache, saturated(low, k_cache), mask=cache_mask)
            tl.store(cache + half, saturated(high, k_cache), mask=cache_mask)
        else:
            largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
            head_scale = int8_scale(largest)[:, None]
            scales = tl.where(value, v_scales, k_scales)
            scales += slot * kv_heads + number + (row % height)[:, None]
            first_slot = tl.where(query, NO_SLOT, 0)
            tl.store(scales, head_scale, mask=slot >= first_slot)
            tl.store(cache, quantize_int8(low, head_scale), mask=cache_mask)
            tl.store(cache + half, quantize_int8(high, head_scale), mask=cache_mask)


@triton.jit
def _normalised(
    first,
    second,
    low_norm,
    high_norm,
    eps,
    mask,
    half: tl.constexpr,
    dtype: tl.constexpr,
    centered: tl.constexpr,
):
    """Normalise the halves of heads, rounded as in transformers: normalised value,
    product.
    """
    if centered:
        mean = (tl.sum(first + second, 1) / (2 * half))[:, None]
        first = tl.where(mask, first - mean, 0.0)
        second = tl.where(mask, second - mean, 0.0)
    squares = tl.sum(first * first + second * second, 1) / (2 * half)
    scale = tl.rsqrt(squares + eps)[:, None]
    first *= scale
    second *= scale
    if low_norm.dtype != tl.float32 and not centered:
        first = first.to(dtype)
        second = second.to(dtype)
    # The product is rounded as well, as in transformers.
    first = (first * low_norm).to(dtype).to(tl.float32)
    second = (second * high_norm).to(dtype).to(tl.float32)
    return first, second


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    scales: CacheScales | None = None,
    v_norm: Norm | None = None,
    *,
    norms_last: bool = False,
    query_scales: Tensor | None = None,
    keys_are_values: bool = False,
) -> None:
    """Rotate queries in `qkv` [tokens, (heads + 2 kv_heads) * dim] in place, and write
    rotated keys and the values to the cache.

    `positions` [tokens]. `cos_sin` [positions, dim] float32: cosines, then sines. `slots`
    [tokens] are block * block_size + offset; a token with a negative one is not written.
    Caches are [blocks, block_size, kv_heads, dim], of the dtype of qkv or of 8 bits
    (cache_numbers.py), with `scales` if INT8. `q_norm` and `k_norm`, both or neither,
    before the rotation unless `norms_last`: [dim], or of each head its own [heads, dim];
    beside them, before it, `v_norm`, of values. keys_are_values: qkv has no values, they
    are the keys as they are in it. kv_heads 0: nothing is written. `query_scales`
    [positions] float32: factors of rotated queries. Computes in float32; keys and values
    in `qkv` stay as they are.
    """
    if not on_triton(qkv):
        _reference(
            qkv,
            cos_sin,
            positions,
            slots,
            k_cache,
            v_cache,
            heads,
            kv_heads,
            q_norm,
            k_norm,
            scales,
            v_norm,
            norms_last=norms_last,
            query_scales=query_scales,
            keys_are_values=keys_are_values,
        )
        return
    half = cos_sin.shape[1] // 2
    height = next(h for h in HEADS_PER_PROGRAM if heads % h == kv_heads % h == 0)
    shared = TOKENS_PER_PROGRAM if len(qkv) >= MIN_SHARED_PROGRAM_TOKENS else 1
    grid = triton.cdiv(len(qkv), shared), (heads + 2 * kv_heads) // height
    _rope[grid](
        qkv=qkv,
        stride=qkv.stride(0),
        table=cos_sin,
        positions=positions,
        slots=slots,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=None if scales is None else scales.keys,
        v_scales=None if scales is None else scales.values,
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        v_norm=None if v_norm is None else v_norm.weight,
        query_scales=query_scales,
        eps=0.0 if q_norm is None else q_norm.eps,
        heads=heads,
        kv_heads=kv_heads,
        tokens=len(qkv),
        half=half,
        pad=triton.next_power_of_2(half),
        normed=q_norm is not None,
        norms_last=norms_last,
        norm_stride=0 if q_norm is None or q_norm.weight.dim() == 1 else 2 * half,
        centered=q_norm is not None and q_norm.centered,
        keys_are_values=keys_are_values,
        block_size=k_cache.shape[1],
        height=height,
        shared=shared,
        num_warps=4 if shared > 1 else 1,
        launch_pdl=early(qkv),
    )


def _reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Norm | None,
    k_norm: Norm | None,
    scales: CacheScales | None,
    v_norm: Norm | None = None,
    *,
    norms_last: bool = False,
    query_scales: Tensor | None = None,
    keys_are_values: bool = False,
) -> None:
    """`rope_and_cache` in plain torch."""
    cos, sin = cos_sin[positions.long(), None].chunk(2, -1)

    def rotate(x: Tensor, norm: Norm | None) -> Tensor:
        normed = x if norm is None or norms_last else normalise(x, norm)
        first, second = normed.float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        if norm is None or not norms_last:
            return turned
        return normalise(turned.to(x.dtype), norm)

    by_head = qkv.view(len(qkv), -1, cos_sin.shape[1])
    query, key = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
    value = key if keys_are_values else by_head[:, heads + kv_heads :]
    rotated = rotate(query, q_norm)
    if query_scales is not None:
        rotated *= query_scales[positions.long(), None, None]
    query.copy_(rotated)
    if not kv_heads:
        return
    written = slots >= 0
    if v_norm is not None:
        value = normalise(value, v_norm)
    new_entries = rotate(key, k_norm)[written].to(qkv.dtype), value[written]
    for cache, new, scale in zip(
        (k_cache, v_cache), new_entries, scales or (None, None), strict=True
    ):
        write(cache, scale, slots[written], new)
