"""Triton kernels around products of many tokens, all bound by memory. They round
activations to 8 bits, by row or by group of a row; scale the integer sums of products;
and dequantize matrices of few bits to the activations' dtype.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels.activation import rounded_gated_product
from minfer.kernels.eight_bit_kernels import nearest
from minfer.kernels.eight_bits import LARGEST
from minfer.kernels.leaf_tiles import leaf_lines, load_tile, scaled_tile
from minfer.kernels.leaves import UNGATED, Activation, Linear, Norm
from minfer.kernels.pdl import early, follow

# Of a row for each warp at once, in loads of 16 bytes.
WARP_ELEMENTS: Final = 256
WARPS: Final = 8
# Of a row, in the registers of `WARPS` warps; a longer row takes twice as many warps.
MAX_TILES: Final = 12
LINES_PER_PROGRAM: Final = 8  # of a program that dequantizes
TILE_DEPTH: Final = 512
DEQUANTIZE_WARPS: Final = 4
SUMS_PER_PROGRAM: Final = 1024  # of a row, of a program that scales them


@triton.jit
def _factors(norm, size: tl.constexpr, tiles: tl.constexpr, tile: tl.constexpr):
    """The norm's weights in tiles; none without a norm."""
    factors = ()
    for i in tl.static_range(0 if norm is None else tiles):
        lane = i * tile + tl.arange(0, tile)
        factors += (tl.load(norm + lane, mask=lane < size, other=0.0),)  # type: ignore[assignment]  # a tuple of Triton grows
    return factors


@triton.jit
def _row(
    x,
    size: tl.constexpr,
    tiles: tl.constexpr,
    tile: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
):
    """A row in tiles, or activation(gate) * up of a row of both, or activation(row)
    if it is not `gated`.
    """
    values = ()
    for i in tl.static_range(tiles):
        lane = i * tile + tl.arange(0, tile)
        value = tl.load(x + lane, mask=lane < size, other=0.0)
        if activation is not None:  # rounded as in activation.py
            up = 1.0
            if gated:
                up = tl.load(x + size + lane, mask=lane < size, other=0.0)
            value = rounded_gated_product(value, up, activation)
        values += (value,)  # type: ignore[assignment]  # as above
    return values


@triton.jit
def _normalised(values, factors, eps, size: tl.constexpr):
    """A row in tiles times its norm's weights, rounded as in norm.py."""
    squares = tl.zeros_like(values[0]).to(tl.float32)
    for i in tl.static_range(len(values)):
        wide = values[i].to(tl.float32)
        squares += wide * wide
    if len(squares.shape) > 1:  # a tile of groups
        squares = tl.sum(squares, 1)
    inverse = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    normed = ()
    for i in tl.static_range(len(values)):
        wide = values[i].to(tl.float32) * inverse
        if factors[i].dtype != tl.float32:
            wide = wide.to(values[i].dtype)
        normed += ((wide * factors[i]).to(values[i].dtype),)  # type: ignore[assignment]  # as above
    return normed


@triton.jit
def _round_rows(
    x,
    norm,
    out,
    scales,
    x_stride,
    eps,
    max_magnitude: tl.constexpr,
    size: tl.constexpr,
    tiles: tl.constexpr,
    tile: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
):
    """Grid [rows]: a row, normalised if there is `norm`, or activation(gate) * up of a
    row of both if there is `activation`, times max_magnitude / largest. It stays in
    registers.
    """
    row = tl.program_id(0).to(tl.int64)
    factors = _factors(norm, size, tiles, tile)
    follow()
    values = _row(x + row * x_stride, size, tiles, tile, activation, gated)
    if norm is not None:
        values = _normalised(values, factors, eps, size)
    largest = tl.abs(values[0].to(tl.float32))
    for i in tl.static_range(1, tiles):
        largest = tl.maximum(largest, tl.abs(values[i].to(tl.float32)))
    top = tl.max(largest, 0)
    scale = tl.where(top > 0, tl.div_rn(top, max_magnitude), 1.0)
    for i in tl.static_range(tiles):
        lane = i * tile + tl.arange(0, tile)
        wide = values[i].to(tl.float32)
        scaled = tl.div_rn(wide, tl.zeros_like(wide) + scale)
        scaled = tl.minimum(tl.maximum(scaled, -max_magnitude), max_magnitude)
        if out.dtype.element_ty == tl.int8:
            scaled = nearest(scaled)
        place = out + row * size + lane
        tl.store(place, scaled.to(out.dtype.element_ty), mask=lane < size)
    tl.store(scales + row, scale)


def round_rows(
    x: Tensor,
    dtype: torch.dtype,
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns rows of x [tokens, inputs] in FP8 or INT8, and their scales [tokens, 1]
    float32, as `quantized.round_activations`.

    norm: normalised before, by RMSNorm. activation: of x [tokens, 2 * inputs], gate then
    up, activation(gate) * up; without a gate, activation(x).
    """
    gated = activation is not None and activation not in UNGATED
    rows, size = len(x), x.shape[1] // (1 + gated)
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    warps = WARPS if size <= MAX_TILES * WARPS * WARP_ELEMENTS else 2 * WARPS
    tile = min(warps * WARP_ELEMENTS, triton.next_power_of_2(size))
    _round_rows[rows,](
        x=x,
        norm=None if norm is None else norm.weight,
        out=out,
        scales=scales,
        x_stride=x.stride(0),
        eps=0.0 if norm is None else norm.eps,
        max_magnitude=LARGEST[dtype],
        size=size,
        tiles=triton.cdiv(size, tile),
        tile=tile,
        activation=activation,
        gated=gated,
        num_warps=max(1, tile // WARP_ELEMENTS),
        launch_pdl=early(x),
    )
    return out, scales


@triton.jit
def scaled_to_8_bits(wide, largest: tl.constexpr):
    """Returns rows in float32 scaled to this largest magnitude, and the scales that make
    them what they were; 1 for zeros.
    """
    top = tl.max(tl.abs(wide), 1)
    scale = tl.where(top > 0, tl.div_rn(top, largest), 1.0)
    scaled = tl.div_rn(wide, tl.zeros_like(wide) + scale[:, None])
    return tl.minimum(tl.maximum(scaled, -largest), largest), scale


@triton.jit
def _round_groups(
    x,
    norm,
    out,
    scales,
    x_stride,
    row_stride,
    group_stride,
    eps,
    max_magnitude: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    pad: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
):
    """Grid [rows]: each group of a row, normalised or multiplied as in `_round_rows`,
    times max_magnitude / largest. The strides of rows and groups are those of scales.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, pad)
    lane = index[:, None] * group + tl.arange(0, group)[None, :]
    mask = lane < size
    if norm is not None:
        factor = tl.load(norm + lane, mask=mask, other=0.0)
    follow()
    value = tl.load(x + row * x_stride + lane, mask=mask, other=0.0)
    if activation is not None:  # rounded as in activation.py
        up = 1.0
        if gated:
            up = tl.load(x + row * x_stride + size + lane, mask=mask, other=0.0)
        value = rounded_gated_product(value, up, activation)
    if norm is not None:
        value = _normalised((value,), (factor,), eps, size)[0]
    scaled, scale = scaled_to_8_bits(value.to(tl.float32), max_magnitude)
    tl.store(out + row * size + lane, scaled.to(out.dtype.element_ty), mask=mask)
    scale_pointers = scales + row * row_stride + index * group_stride
    tl.store(scale_pointers, scale, mask=index < size // group)


def round_groups(
    x: Tensor,
    dtype: torch.dtype,
    group: int,
    norm: Norm | None = None,
    activation: Activation | None = None,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns rows of x [tokens, inputs], groups of which have scales, in FP8, and the
    scales [tokens, groups] float32, as `quantized.round_activations`. `group` is a power
    of two that divides the inputs. norm and activation: as in `round_rows`.

    rows: of the results, if not as many as tokens; what the rest holds may be anything.
    The scales of a group are then one beside the other in memory.
    """
    gated = activation is not None and activation not in UNGATED
    tokens, size = len(x), x.shape[1] // (1 + gated)
    groups = size // group
    out = torch.empty(rows or tokens, size, dtype=dtype, device=x.device)
    if rows is None:
        scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    else:
        scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    pad = triton.next_power_of_2(groups)
    _round_groups[tokens,](
        x=x,
        norm=None if norm is None else norm.weight,
        out=out,
        scales=scales,
        x_stride=x.stride(0),
        row_stride=scales.stride(0),
        group_stride=scales.stride(1),
        eps=0.0 if norm is None else norm.eps,
        max_magnitude=LARGEST[dtype],
        size=size,
        group=group,
        pad=pad,
        activation=activation,
        gated=gated,
        num_warps=min(max(1, pad * group // WARP_ELEMENTS), 2 * WARPS),
        launch_pdl=early(x),
    )
    return out, scales


@triton.jit
def _dequantize(
    weight,
    scales,
    extras,
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
    leaf = leaf_lines(weight, scales, extras, tl.minimum(line, lines - 1), size, group)
    k = tl.program_id(1) * depth
    wide = scaled_tile(load_tile(leaf, k, size, size % depth == 0, depth, group))
    follow()
    lane = k + tl.arange(0, depth)[None, :]
    out_pointers = out + line.to(tl.int64)[:, None] * size + lane
    mask = (line < lines)[:, None] & (lane < size)
    tl.store(out_pointers, wide.to(out.dtype.element_ty), mask=mask)


def dequantized(matrix: Linear, x: Tensor) -> Tensor:
    """Returns a leaf's matrix in the dtype of `x`, as `quantized.dequantize`."""
    lines, size = len(matrix.weight), matrix.inputs
    out = x.new_empty(lines, size)
    _dequantize[triton.cdiv(lines, LINES_PER_PROGRAM), triton.cdiv(size, TILE_DEPTH)](
        weight=matrix.weight,
        scales=matrix.scaled,
        extras=matrix.extras,
        out=out,
        lines=lines,
        size=size,
        group=matrix.scheme.group or max(size, TILE_DEPTH),
        tall=LINES_PER_PROGRAM,
        depth=TILE_DEPTH,
        num_warps=DEQUANTIZE_WARPS,
        launch_pdl=early(x),
    )
    return out


@triton.jit
def _scale_sums(
    sums,
    x_scales,
    scales,
    bias,
    out,
    columns,
    add: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [rows, tiles of columns]: `scaled_sums` of a tile."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < columns
    factor = tl.load(scales + column, mask=mask, other=0.0)
    start = tl.zeros([tile], tl.float32)
    if bias is not None:
        start += tl.load(bias + column, mask=mask, other=0.0)
    follow()
    wide = tl.load(sums + row * columns + column, mask=mask, other=0).to(tl.float32)
    total = wide * tl.load(x_scales + row) * factor
    if bias is not None:
        total += start
    out_pointers = out + row * columns + column
    if add:
        total += tl.load(out_pointers, mask=mask, other=0.0)
    tl.store(out_pointers, total.to(out.dtype.element_ty), mask=mask)


def scaled_sums(
    sums: Tensor,
    x_scales: Tensor,
    matrix: Linear,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Returns sums of integers [tokens, outputs] int32 times the scales of rows
    [tokens, 1] and of the leaf's outputs, plus its bias: in `dtype`, or added to `out`,
    which is contiguous.
    """
    tokens, columns = sums.shape
    add = out is not None
    if out is None:
        out = torch.empty(tokens, columns, dtype=dtype, device=sums.device)
    _scale_sums[tokens, triton.cdiv(columns, SUMS_PER_PROGRAM)](
        sums=sums,
        x_scales=x_scales,
        scales=matrix.scaled,
        bias=matrix.bias,
        out=out,
        columns=columns,
        add=add,
        tile=SUMS_PER_PROGRAM,
        num_warps=4,
        # A product and a sum are rounded one after the other, as in quantized.py.
        enable_fp_fusion=False,
        launch_pdl=early(sums),
    )
    return out
