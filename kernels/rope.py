"""All between the QKV projection and attention, in one launch: QK-norm, rotation, KV
write.

Bound by memory: 4,096 tokens of 36 heads of 128 in 2 bytes are 75 MB in all, 18 us at 4.2
TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.norm import rms_norm
from minfer.kernels.pdl import early, follow

HEADS = (4, 2, 1)  # of a program: with 4 heads of 128 a thread loads 16 bytes
MANY, SHARED = 512, 8  # from so many tokens on, so many share a program


# Triton ships no types.
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _rope(  # type: ignore[no-untyped-def]  # Triton's
    qkv,
    stride,
    table,
    positions,
    slots,
    k_cache,
    v_cache,
    slot_stride,
    q_norm,
    k_norm,
    eps,
    heads,
    kv_heads,
    tokens,
    half: tl.constexpr,
    pad: tl.constexpr,
    normed: tl.constexpr,
    height: tl.constexpr,
    shared: tl.constexpr,
):
    """Rows of a program are `height` heads of each of `shared` tokens."""
    row, head = tl.arange(0, height * shared), tl.program_id(1) * height
    token = (tl.program_id(0) * shared + row // height).to(tl.int64)
    query, value = (
        head < heads,
        head >= heads + kv_heads,
    )  # the same for all heads of a program
    lane, given = tl.arange(0, pad)[None, :], token < tokens
    wide = (lane < half) & given[:, None]
    inner = (row % height)[:, None] * (2 * half) + lane
    here = qkv + token[:, None] * stride + head * (2 * half) + inner
    if normed:
        weight = tl.where(query, q_norm, k_norm) + lane
        low_norm = tl.load(weight, mask=lane < half, other=0.0)
        high_norm = tl.load(weight + half, mask=lane < half, other=0.0)
    follow()
    left = tl.load(here, mask=wide, other=0.0)
    right = tl.load(here + half, mask=wide, other=0.0)
    first, second = left.to(tl.float32), right.to(tl.float32)
    if normed:  # rounded where transformers rounds: normalised value, product
        squares = tl.sum(first * first + second * second, 1) / (2 * half)
        scale = tl.rsqrt(squares + eps)[:, None]
        first = (first * scale).to(left.dtype) * low_norm
        second = (second * scale).to(left.dtype) * high_norm
    place = tl.load(positions + token, mask=given, other=0).to(tl.int64)
    angle = table + place[:, None] * (2 * half) + lane
    cos, sin = (
        tl.load(angle, mask=wide, other=0.0),
        tl.load(angle + half, mask=wide, other=0.0),
    )
    low = tl.where(value, left.to(tl.float32), first * cos - second * sin)
    high = tl.where(value, right.to(tl.float32), second * cos + first * sin)
    slot = tl.load(slots + token, mask=given, other=-1).to(tl.int64)[:, None]
    number = head - heads - tl.where(value, kv_heads, 0)
    cache = (
        tl.where(value, v_cache, k_cache)
        + slot * slot_stride
        + number * (2 * half)
        + inner
    )
    there, stop = tl.where(query, here, cache), tl.where(query | (slot >= 0), half, 0)
    tl.store(there, low, mask=wide & (lane < stop))
    tl.store(there + half, high, mask=wide & (lane < stop))


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries in `qkv` [tokens, (heads + 2 kv_heads) * dim] in place, write keys
    and values.

    `cos_sin` [positions, dim] float32: cosines, then sines. `slots` [tokens] are block *
    block_size + offset, negative: not written. Caches are [blocks, block_size, kv_heads,
    dim]. `q_norm` and `k_norm` [dim]: both or neither. float32 inside; keys and values in
    `qkv` stay as they are.
    """
    half, total = cos_sin.shape[1] // 2, heads + 2 * kv_heads
    if on_triton(qkv):
        height = next(h for h in HEADS if heads % h == kv_heads % h == 0)
        shared = SHARED if len(qkv) >= MANY else 1
        _rope[triton.cdiv(len(qkv), shared), total // height](
            qkv,
            qkv.stride(0),
            cos_sin,
            positions,
            slots,
            k_cache,
            v_cache,
            k_cache.stride(1),
            q_norm,
            k_norm,
            eps,
            heads,
            kv_heads,
            len(qkv),
            half,
            triton.next_power_of_2(half),
            q_norm is not None,
            height,
            shared,
            num_warps=4 if shared > 1 else 1,
            launch_pdl=early(qkv),
        )
        return
    parts = torch.split(qkv.view(-1, total, 2 * half), [heads, kv_heads, kv_heads], 1)
    cos, sin = cos_sin[positions.long(), None].chunk(2, -1)  # from here on the reference
    turned = []
    for x, weight in zip(parts, (q_norm, k_norm), strict=False):
        first, second = (
            (x if weight is None else rms_norm(x, weight, eps)).float().chunk(2, -1)
        )
        turned.append(
            torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        )
    parts[0].copy_(turned[0])
    k_cache.flatten(0, 1)[slots[slots >= 0]] = turned[1][slots >= 0].to(qkv.dtype)
    v_cache.flatten(0, 1)[slots[slots >= 0]] = parts[2][slots >= 0]
