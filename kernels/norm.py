"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), and the addition to
the residual stream before them.

Bound by memory: 4,096 tokens of 3,584 in 2 bytes are 117 MB in all, 28 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.leaves import Norm
from minfer.kernels.pdl import early, follow

TILE_ELEMENTS = 4096  # elements of a program
WARP_ELEMENTS = 512  # elements of a warp
MAX_WARPS = 16
MIN_SHARED_PROGRAM_ROWS = 1024  # rows from which on rows share programs


@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x,
    weight,
    bias,
    residual,
    out,
    x_stride,
    residual_stride,
    out_stride,
    rows,
    eps,
    size: tl.constexpr,
    pad: tl.constexpr,
    height: tl.constexpr,
    add: tl.constexpr,
    centered: tl.constexpr,
):
    """Grid [rows / height]: `height` rows of a program."""
    row = (tl.program_id(0) * height + tl.arange(0, height)).to(tl.int64)[:, None]
    lane = tl.arange(0, pad)[None, :]
    mask = (row < rows) & (lane < size)
    factor = tl.load(weight + lane, mask=lane < size, other=0.0)
    if bias is not None:
        shift = tl.load(bias + lane, mask=lane < size, other=0.0)
    follow()
    value = tl.load(x + row * x_stride + lane, mask=mask, other=0.0)
    if add:
        residual_pointers = residual + row * residual_stride + lane
        value += tl.load(residual_pointers, mask=mask, other=0.0)
        tl.store(residual_pointers, value, mask=mask)
    wide = value.to(tl.float32)
    if centered:
        wide = tl.where(mask, wide - (tl.sum(wide, 1) / size)[:, None], 0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
    if factor.dtype != tl.float32 and not centered:
        scaled = scaled.to(value.dtype)
    normalised = scaled * factor
    if bias is not None:
        normalised += shift
    tl.store(out + row * out_stride + lane, normalised, mask=mask)


def normalise(
    x: Tensor,
    norm: Norm,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise rows of `x` [tokens, hidden]; with `residual`, add `x` to it and
    normalise that.

    float32 inside, rounded as in transformers: of LayerNorm once, at the end. One dtype,
    or factors in float32; rows contiguous; `out` may be `x`. On the CPU, `x` may have
    more dimensions.
    """
    if not on_triton(x):
        summed = x if residual is None else residual.add_(x)
        return plain.normalise(summed, norm, out)
    if out is None:
        out = torch.empty_like(x)
    rows, size = x.shape
    pad = triton.next_power_of_2(size)
    height = max(1, TILE_ELEMENTS // pad) if rows >= MIN_SHARED_PROGRAM_ROWS else 1
    # A kernel needs a tensor: x is not read.
    residual_or_x = x if residual is None else residual
    _normalise[triton.cdiv(rows, height),](
        x=x,
        weight=norm.weight,
        bias=norm.bias,
        residual=residual_or_x,
        out=out,
        x_stride=x.stride(0),
        residual_stride=residual_or_x.stride(0),
        out_stride=out.stride(0),
        rows=rows,
        eps=norm.eps,
        size=size,
        pad=pad,
        height=height,
        add=residual is not None,
        centered=norm.centered,
        num_warps=min(MAX_WARPS, max(1, pad * height // WARP_ELEMENTS)),
        launch_pdl=early(x),
    )
    return out
