"""MLA's cache of latents: a latent's norm, the rotation, and the write, in one launch.

Bound by memory: 4,096 tokens of 16 heads in 2 bytes are 26 MB in all, 6 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.cache_numbers import write
from minfer.kernels.eight_bit_kernels import saturated
from minfer.kernels.leaves import Norm
from minfer.kernels.norm import normalise
from minfer.kernels.pdl import early, follow

HEADS_PER_PROGRAM = 16  # of a program


@triton.jit
def _store_key(
    kv,
    factor,
    out,
    cos,
    sin,
    eps,
    slot,
    latent: tl.constexpr,
    latent_pad: tl.constexpr,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Norm a token's latent and rotate its key, at kv, and store both at `out`, unless
    its slot is negative.
    """
    dims = tl.arange(0, latent_pad)
    value = tl.load(kv + dims, mask=dims < latent, other=0.0)
    lane = tl.arange(0, half_pad)
    first = latent + (lane * 2 if interleaved else lane)
    second = first + (1 if interleaved else half)
    low = tl.load(kv + first, mask=lane < half, other=0.0).to(tl.float32)
    high = tl.load(kv + second, mask=lane < half, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / latent + eps)
    # Rounded as in transformers: normalised value, product.
    normed = (wide * scale).to(value.dtype) * factor
    latent_mask = dims < tl.where(slot >= 0, latent, 0)
    rotated_mask = lane < tl.where(slot >= 0, half, 0)
    left = low * cos - high * sin
    right = high * cos + low * sin
    if out.dtype.element_ty != kv.dtype.element_ty:
        # Rounded to the dtype of kv first, then to 8 bits.
        normed = saturated(normed.to(tl.float32), out)
        left = saturated(left.to(kv.dtype.element_ty).to(tl.float32), out)
        right = saturated(right.to(kv.dtype.element_ty).to(tl.float32), out)
    tl.store(out + dims, normed, mask=latent_mask)
    tl.store(out + first, left, mask=rotated_mask)
    tl.store(out + second, right, mask=rotated_mask)


@triton.jit
def _rotate_heads(
    q,
    out,
    cos,
    sin,
    head,
    q_head,
    out_head,
    heads,
    query_scale,
    plain: tl.constexpr,
    plain_pad: tl.constexpr,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Rotate heads `head` of a token's queries, at q, and store them at `out`. With a
    factor `query_scale`, it multiplies them, and the `plain` numbers before each there.
    """
    lane = tl.arange(0, half_pad)[None, :]
    head = head[:, None]
    mask = (head < heads) & (lane < half)
    first = lane * 2 if interleaved else lane
    second = first + (1 if interleaved else half)
    low = tl.load(q + head * q_head + first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(q + head * q_head + second, mask=mask, other=0.0).to(tl.float32)
    cos = cos[None, :]
    sin = sin[None, :]
    left = low * cos - high * sin
    right = high * cos + low * sin
    if query_scale is not None:
        left *= query_scale
        right *= query_scale
        dims = tl.arange(0, plain_pad)[None, :]
        plain_mask = (head < heads) & (dims < plain)
        plain_pointers = out + head * out_head - plain + dims
        numbers = tl.load(plain_pointers, mask=plain_mask, other=0.0).to(tl.float32)
        tl.store(plain_pointers, numbers * query_scale, mask=plain_mask)
    tl.store(out + head * out_head + first, left, mask=mask)
    tl.store(out + head * out_head + second, right, mask=mask)


# Tokens may begin anywhere among a step's.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _write_latent(
    kv,
    weight,
    cos_sin,
    positions,
    slots,
    cache,
    q,
    out,
    query_scales,
    eps,
    kv_row,
    q_row,
    q_head,
    out_row,
    out_head,
    stride_block,
    stride_token,
    heads,
    block_size: tl.constexpr,
    latent: tl.constexpr,
    latent_pad: tl.constexpr,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    plain: tl.constexpr,
    plain_pad: tl.constexpr,
    height: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Grid [tokens, 1 + heads / height]: a token's first program writes the cache, the
    others rotate `height` heads each.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dims = tl.arange(0, latent_pad)
    factor = tl.load(
        weight + dims, mask=dims < tl.where(group == 0, latent, 0), other=0.0
    )
    follow()
    lane = tl.arange(0, half_pad)
    position = tl.load(positions + token).to(tl.int64)
    angle = cos_sin + position * (2 * half) + lane
    cos = tl.load(angle, mask=lane < half, other=0.0)
    sin = tl.load(angle + half, mask=lane < half, other=0.0)
    if group == 0:
        slot = tl.load(slots + token).to(tl.int64)
        place = slot // block_size * stride_block + slot % block_size * stride_token
        _store_key(
            kv + token * kv_row,
            factor,
            cache + place,
            cos,
            sin,
            eps,
            slot,
            latent,
            latent_pad,
            half,
            half_pad,
            interleaved,
        )
    else:
        query_scale = None
        if query_scales is not None:
            query_scale = tl.load(query_scales + position)
        _rotate_heads(
            q + token * q_row,
            out + token * out_row,
            cos,
            sin,
            (group - 1) * height + tl.arange(0, height),
            q_head,
            out_head,
            heads,
            query_scale,
            plain,
            plain_pad,
            half,
            half_pad,
            interleaved,
        )


def write_latent(
    kv: Tensor,
    norm: Norm,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q: Tensor,
    *,
    out: Tensor | None = None,
    interleaved: bool = True,
    query_scales: Tensor | None = None,
    plain_dim: int = 0,
) -> None:
    """Norm latents, rotate keys, write both to the cache, and rotate queries, in one
    launch.

    kv [tokens, latent + rotated], rows at any stride: latents before their norm, then
    keys; it stays as it is. q [tokens, heads, rotated]: the parts of queries that are
    rotated, any strides but the last; `out`, of the same shape, gets them, or q itself.
    cos_sin [positions, rotated] float32: cosines, then sines. slots [tokens] are block *
    block_size + offset, negative: not written. cache [blocks, block_size, latent +
    rotated], any strides but the last, of the dtype of kv or FP8. float32 inside; latents
    are rounded as by `normalise`.

    Angle i turns the numbers (2i, 2i + 1), of keys and queries, and they stay there
    (transformers' DeepSeek-V3 then moves them to (i, i + half), which changes no product
    of a key and a query); without `interleaved` it turns (i, i + half).

    query_scales [positions] float32: factors of queries. The `plain_dim` numbers that
    stand before each rotated part in `out` are multiplied with them in place.
    """
    out = q if out is None else out
    latent, rotated = kv.shape[1] - cos_sin.shape[1], cos_sin.shape[1]
    sizes = (len(norm.weight), cache.shape[2], *q.shape[::2], *out.shape)
    if sizes != (latent, kv.shape[1], len(kv), rotated, *q.shape):
        raise ValueError(
            f"kv {tuple(kv.shape)}, a norm of {len(norm.weight)}, cos_sin "
            f"{tuple(cos_sin.shape)}, a cache of {tuple(cache.shape)}, q "
            f"{tuple(q.shape)} and out {tuple(out.shape)} do not fit together"
        )
    if not on_triton(kv):
        factors = None if query_scales is None else query_scales[positions.long()]
        _write_reference(
            kv,
            norm,
            cos_sin,
            positions,
            slots,
            cache,
            q,
            out,
            interleaved,
            factors,
            plain_dim,
        )
        return
    height = min(HEADS_PER_PROGRAM, triton.next_power_of_2(q.shape[1]))
    _write_latent[len(kv), 1 + triton.cdiv(q.shape[1], height)](
        kv=kv,
        weight=norm.weight,
        cos_sin=cos_sin,
        positions=positions,
        slots=slots,
        cache=cache,
        q=q,
        out=out,
        query_scales=query_scales,
        eps=norm.eps,
        kv_row=kv.stride(0),
        q_row=q.stride(0),
        q_head=q.stride(1),
        out_row=out.stride(0),
        out_head=out.stride(1),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        heads=q.shape[1],
        block_size=cache.shape[1],
        latent=latent,
        latent_pad=triton.next_power_of_2(latent),
        half=rotated // 2,
        half_pad=triton.next_power_of_2(rotated // 2),
        plain=plain_dim,
        plain_pad=triton.next_power_of_2(max(1, plain_dim)),
        height=height,
        interleaved=interleaved,
        num_warps=2,
        launch_pdl=early(kv),
    )


def _write_reference(
    kv: Tensor,
    norm: Norm,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q: Tensor,
    out: Tensor,
    interleaved: bool,
    factors: Tensor | None = None,
    plain_dim: int = 0,
) -> None:
    """`write_latent` in plain torch; `factors` [tokens] are of queries."""
    cos, sin = cos_sin[positions.long(), None].chunk(2, -1)
    latent = len(norm.weight)

    def rotate(x: Tensor) -> Tensor:
        wide = x.float()
        pairs = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
        first, second = pairs
        rotated_pair = first * cos - second * sin, second * cos + first * sin
        return (
            torch.stack(rotated_pair, -1).flatten(-2)
            if interleaved
            else torch.cat(rotated_pair, -1)
        )

    normed = normalise(kv[:, :latent], norm)
    keys = rotate(kv[:, None, latent:])[:, 0].to(kv.dtype)
    written = slots >= 0
    write(cache, None, slots[written], torch.cat((normed, keys), 1)[written])
    if factors is None:
        out.copy_(rotate(q))
        return
    plain = out.as_strided(
        (*out.shape[:2], plain_dim), out.stride(), out.storage_offset() - plain_dim
    )
    plain.copy_(plain.float() * factors[:, None, None])
    out.copy_(rotate(q) * factors[:, None, None])
