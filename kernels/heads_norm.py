"""RMSNorm over the queries of all heads together, and over the keys (OLMo 2, MiniMax M2),
in place and in one launch.

Ranks that have some of the heads each sum their squares first: `square_sums`, a sum over
the ranks, then `norm_heads` with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.leaves import WholeNorms
from minfer.kernels.norm import MAX_WARPS, WARP_ELEMENTS
from minfer.kernels.pdl import early, follow


@triton.jit
def _norm_heads(
    qkv,
    stride,
    query_norm,
    key_norm,
    squares,
    eps,
    ranks,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [tokens, 2]: a token's queries, then its keys."""
    token = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1)  # 1, or 0: queries
    size = tl.where(keys == 1, key_size, query_size)
    lane = tl.arange(0, pad)
    mask = lane < size
    norm = tl.where(keys == 1, key_norm, query_norm)
    factor = tl.load(norm + lane, mask=mask, other=0.0)
    follow()
    pointers = qkv + token * stride + keys * query_size + lane
    value = tl.load(pointers, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    if squares is None:
        total = tl.sum(wide * wide, 0)
    else:
        total = tl.load(squares + token * 2 + keys)
    scaled = wide * tl.rsqrt(total / (size * ranks) + eps)
    if factor.dtype != tl.float32:
        scaled = scaled.to(value.dtype)
    tl.store(pointers, scaled * factor, mask=mask)


@triton.jit
def _square_sums(
    qkv,
    stride,
    out,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [tokens, 2]: a token's queries, then its keys."""
    token = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1)
    lane = tl.arange(0, pad)
    mask = lane < tl.where(keys == 1, key_size, query_size)
    follow()
    pointers = qkv + token * stride + keys * query_size + lane
    wide = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * 2 + keys, tl.sum(wide * wide, 0))


def square_sums(qkv: Tensor, norms: WholeNorms) -> Tensor:
    """Returns the sums of squares of each token's queries and keys, [tokens, 2] float32,
    of `qkv` [tokens, queries + keys + values].
    """
    if not on_triton(qkv):
        return plain.square_sums(qkv, norms)
    out = torch.empty(len(qkv), 2, dtype=torch.float32, device=qkv.device)
    query_size, key_size, pad, warps = _shape(norms)
    _square_sums[len(qkv), 2](
        qkv=qkv,
        stride=qkv.stride(0),
        out=out,
        query_size=query_size,
        key_size=key_size,
        pad=pad,
        num_warps=warps,
        launch_pdl=early(qkv),
    )
    return out


def norm_heads(
    qkv: Tensor, norms: WholeNorms, squares: Tensor | None = None, ranks: int = 1
) -> None:
    """Normalise the queries and the keys of `qkv` [tokens, queries + keys + values] in
    place. `squares` [tokens, 2]: sums of squares over the heads of so many `ranks`, each
    with as many heads; None: of these heads.

    float32 inside, rounded as `norm.normalise`.
    """
    if not on_triton(qkv):
        plain.norm_heads(qkv, norms, squares, ranks)
        return
    query_size, key_size, pad, warps = _shape(norms)
    _norm_heads[len(qkv), 2](
        qkv=qkv,
        stride=qkv.stride(0),
        query_norm=norms.query.weight,
        key_norm=norms.key.weight,
        squares=squares,
        eps=norms.query.eps,
        ranks=ranks,
        query_size=query_size,
        key_size=key_size,
        pad=pad,
        num_warps=warps,
        launch_pdl=early(qkv),
    )


def _shape(norms: WholeNorms) -> tuple[int, int, int, int]:
    """Returns the sizes of queries and keys, the power of two that holds both, and the
    warps of a program.
    """
    query_size, key_size = len(norms.query.weight), len(norms.key.weight)
    pad = triton.next_power_of_2(max(query_size, key_size))
    return query_size, key_size, pad, min(MAX_WARPS, max(1, pad // WARP_ELEMENTS))
