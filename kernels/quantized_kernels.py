"""Triton kernels around products of many tokens: rows of activations rounded to 8 bits,
and a matrix of few bits to the activations' dtype. Both are bound by memory.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels.leaf_tiles import leaf_lines, load_tile, scaled_tile
from minfer.kernels.leaves import Linear, Norm
from minfer.kernels.pdl import early, follow
from minfer.kernels.quantized import FP8_MAX, INT8_MAX

WARP: Final = 1024  # elements of a row for each warp
MOST_WARPS: Final = 16
LINES: Final = 8  # of a program that dequantizes
DEPTH: Final = 512
DEQUANTIZE_WARPS: Final = 4
# Added to a float32 of at most 2^22 and taken off, it leaves the nearest integer.
ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def _round_rows(
    x,
    norm,
    out,
    scales,
    x_stride,
    eps,
    most: tl.constexpr,
    size: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [rows]: a row, normalised if there is `norm`, times most / largest."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, pad)
    inside = lane < size
    if norm is not None:
        factor = tl.load(norm + lane, mask=inside, other=0.0)
    follow()
    value = tl.load(x + row * x_stride + lane, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if norm is not None:  # rounded as in norm.py
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        if factor.dtype != tl.float32:
            wide = wide.to(value.dtype)
        wide = (wide * factor).to(value.dtype).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, most), 1.0)
    scaled = tl.div_rn(wide, tl.zeros_like(wide) + scale)
    scaled = tl.minimum(tl.maximum(scaled, -most), most)
    if out.dtype.element_ty == tl.int8:
        scaled = scaled + ROUND - ROUND
    tl.store(out + row * size + lane, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_rows(
    x: Tensor, dtype: torch.dtype, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows of x [tokens, inputs], normalised if there is a norm, in FP8 or INT8,
    and their scales [tokens, 1] float32, as `quantized.round_activations`.
    """
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    pad = triton.next_power_of_2(size)
    _round_rows[rows,](
        x=x,
        norm=None if norm is None else norm.weight,
        out=out,
        scales=scales,
        x_stride=x.stride(0),
        eps=0.0 if norm is None else norm.eps,
        most=float(INT8_MAX) if dtype is torch.int8 else FP8_MAX,
        size=size,
        pad=pad,
        num_warps=min(MOST_WARPS, max(1, pad // WARP)),
        launch_pdl=early(x),
    )
    return out, scales


@triton.jit
def _dequantize(
    weight,
    scales,
    zeros,
    out,
    lines,
    size: tl.constexpr,
    group: tl.constexpr,
    tall: tl.constexpr,
    depth: tl.constexpr,
):
    """Grid [tiles of lines, tiles of inputs]."""
    line = tl.program_id(0) * tall + tl.arange(0, tall)
    # Lines past the end repeat the last.
    leaf = leaf_lines(weight, scales, zeros, tl.minimum(line, lines - 1), size, group)
    k = tl.program_id(1) * depth
    wide = scaled_tile(load_tile(leaf, k, size, size % depth == 0, depth, group))
    follow()
    lane = k + tl.arange(0, depth)[None, :]
    where = out + line.to(tl.int64)[:, None] * size + lane
    mine = (line < lines)[:, None] & (lane < size)
    tl.store(where, wide.to(out.dtype.element_ty), mask=mine)


def dequantized(by: Linear, x: Tensor) -> Tensor:
    """Returns a leaf's matrix in the dtype of `x`, as `quantized.dequantize`."""
    lines, size = len(by.weight), by.inputs
    out = x.new_empty(lines, size)
    _dequantize[triton.cdiv(lines, LINES), triton.cdiv(size, DEPTH)](
        weight=by.weight,
        scales=by.scaled,
        zeros=by.zeros,
        out=out,
        lines=lines,
        size=size,
        group=by.scheme.group or max(size, DEPTH),
        tall=LINES,
        depth=DEPTH,
        num_warps=DEQUANTIZE_WARPS,
        launch_pdl=early(x),
    )
    return out
