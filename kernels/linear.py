"""A decode step's matrix products, with the norm before, the gate or the sum after them
inside.

Theory. For few tokens a product costs its weights' bytes / bandwidth and a launch, so
norm, gate and sum ride along: a layer takes 4 launches around attention, not 8. x *
norm_weight is multiplied as it comes while its squares add up; rsqrt(mean) scales the
sums, a step of rounding off norm.py's. One token (`rows` 1): weights times x in float32,
summed over lanes at the end. More: x is padded to the 16 rows of the tensor cores, of
which those that are there are loaded. Latency near 0.8 us at 4.2 TB/s asks for 25 KB in
flight on each of 132 processors: for few columns, some `splits` programs share a tile's
depth and leave their sums; the last to arrive adds all of them up, in order. While the
kernel before runs (pdl.py), the first weights come: to registers (HELD), else to the
cache.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.activation import silu_mul
from minfer.kernels.gated import gated, pays
from minfer.kernels.norm import rms_norm
from minfer.kernels.pdl import arrivals, early, follow, prefetch

# Rows of a program (1: a token each; else at least all), its columns, depth of a pass (a
# warp's share at least 256 for one row, else 64, or loads change their layout), splits,
# warps, stages.
Tune = tuple[int, int, int, int, int, int]
# Bytes of weights that a thread may hold when it starts to wait for x, if `stages` is 1
# and there are at most so many weights: with more, programs come in waves, and only the
# first would gain.
HELD, HELD_WEIGHTS = 256, 12e6
MOST = 16  # tokens of any entry
# (tokens at most, millions of weights at most, constants): the first that fits; if none,
# cuBLAS. Best of 875 candidates at the shapes of Qwen2.5 0.5B, 1.5B and 7B on an H200, in
# CUDA graphs over 220 MB of weights (2026-11-20). Against norm, cuBLAS and activation
# apart, a step's products take at 1 token 0.58, 0.69 and 0.86 of the time, at 16 tokens
# 0.95, 0.98 and 0.96.
TABLE: dict[str, list[tuple[int, float, Tune | None]]] = {
    "norm_linear": [
        (4, 2, (1, 2, 512, 1, 2, 1)),
        (4, 8, (1, 4, 256, 1, 1, 4)),
        (1, 99, (1, 4, 256, 1, 1, 4)),
        (2, 99, (1, 8, 256, 1, 1, 4)),
    ],
    "linear_add": [
        (2, 1.5, (1, 2, 1024, 1, 4, 1)),
        (1, 3, (1, 2, 2048, 1, 8, 1)),
        (1, 8, (1, 2, 4096, 1, 8, 1)),
        (1, 13, (1, 1, 512, 1, 1, 1)),
        (1, 20, (1, 4, 1024, 1, 4, 4)),
        (1, 999, (1, 4, 512, 1, 1, 4)),
        (2, 3, (1, 2, 1024, 1, 4, 1)),
        (2, 8, (1, 4, 1024, 1, 2, 4)),
        (2, 13, (1, 8, 256, 1, 1, 4)),
        (2, 20, (1, 4, 512, 1, 2, 4)),
        (2, 999, (1, 4, 256, 1, 1, 4)),
        (4, 1.5, (1, 4, 512, 1, 2, 1)),
        (4, 3, (1, 4, 256, 1, 1, 4)),
        (16, 1.5, (16, 16, 256, 1, 2, 5)),
        (16, 3, (16, 16, 128, 4, 2, 6)),
        (16, 8, (16, 64, 128, 8, 4, 4)),
        (16, 13, (16, 64, 64, 4, 4, 6)),
        (16, 20, (16, 32, 128, 4, 2, 6)),
        (16, 999, (16, 64, 64, 4, 2, 6)),
    ],
    "norm_gated": [
        (2, 12, (1, 2, 1024, 1, 1, 1)),
        (2, 60, (1, 1, 2048, 1, 1, 1)),
        (1, 999, (1, 2, 4096, 1, 8, 1)),
        (16, 60, None),
        (16, 999, (16, 64, 128, 1, 2, 3)),
    ],
}


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
# Triton's.
def _tile(weight, norm, k, size: tl.constexpr, depth: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a pass multiplies x with: weights and the norm's; and which of
    them are there.
    """
    lane = k + tl.arange(0, depth)[None, :]
    inside = (lane < size) | (size % depth == 0)
    w = tl.load(weight + lane, mask=inside, other=0.0)
    n = tl.load(norm + lane, mask=inside, other=0.0) if norm is not None else w
    return w, n, inside


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
# Triton's.
def _pass(acc, squares, x, there, tile, normed: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums with a tile's products more; those of one row are not yet summed over the
    depth.
    """
    w, n, inside = tile
    y = tl.load(x + tl.arange(0, w.shape[1])[None, :], mask=there & inside, other=0.0)
    if normed:
        wide = y.to(tl.float32)
        squares += wide * wide
        y = wide * n
    if y.shape[0] == 1:
        acc += w.to(tl.float32) * y
    else:
        acc = tl.dot(y.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    return acc, squares


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _products(  # type: ignore[no-untyped-def]  # Triton's
    x,
    norm,
    weight,
    tiles,
    there,
    first,
    last,
    size: tl.constexpr,
    rows: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """Sums from `first` to `last`: with `lines` of weights [rows, lines], of squares
    [rows].
    """
    acc = tl.zeros([lines, depth] if rows == 1 else [rows, lines], tl.float32)
    squares = tl.zeros([rows, depth], tl.float32)
    for i in tl.static_range(held):
        at = x + first + i * depth
        acc, squares = _pass(acc, squares, at, there, tiles[i], norm is not None)
    if held == 0:
        for k in tl.range(first, last, depth, num_stages=stages):
            tile = _tile(weight, norm, k, size, depth)
            acc, squares = _pass(acc, squares, x + k, there, tile, norm is not None)
    if rows == 1:
        acc = tl.sum(acc, 1)[None, :]
    return acc, tl.sum(squares, 1)


# Triton ships no types.
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]  # Triton's
    x,
    norm,
    weight,
    bias,
    out,
    parts,
    arrivals,
    eps,
    tokens,
    columns,
    gated: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """Grid [tiles of rows, tiles of columns * splits]; all rows contiguous; no norm: out
    +=.
    """
    tile, part = tl.program_id(1) // splits, tl.program_id(1) % splits
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    column = tile * cols + tl.arange(0, cols)
    where, mine = out + row * columns + column, (row < tokens) & (column < columns)
    # Gates and what they multiply take turns. Lines past the end are the last: it needs
    # no mask.
    each: tl.constexpr = 1 + gated
    lines: tl.constexpr = cols * each
    line = tl.arange(0, lines)
    line = tl.minimum(tile * cols + line // each, columns - 1) + line % each * columns
    at = weight + line.to(tl.int64)[:, None] * size
    share: tl.constexpr = (size + depth * splits - 1) // (depth * splits) * depth
    first = part * share
    # What is added at the end is loaded at the start: it would cost a latency there.
    start, tiles = tl.zeros([rows, lines], tl.float32), tl.tuple([])
    if bias is not None:
        start += tl.load(bias + line)
    for i in tl.static_range(held):
        tiles += (_tile(at, norm, first + i * depth, size, depth),)
    for i in tl.static_range(0 if held else stages):
        prefetch(
            at + tl.minimum(first + i * depth + tl.arange(0, depth // 16) * 16, size - 16)
        )
    follow()
    if norm is None:
        start += tl.load(where, mask=mine, other=0.0)
    acc, total = _products(
        x + row * size,
        norm,
        at,
        tiles,
        row < tokens,
        first,
        tl.minimum(first + share, size),
        size,
        rows,
        lines,
        depth,
        stages,
        held,
    )
    if splits > 1:
        cell, lot = tile * tl.num_programs(0) + tl.program_id(0), rows * (lines + 1)
        base = parts + cell.to(tl.int64) * (splits * lot)
        sums = base + tl.arange(0, rows)[:, None] * lines + tl.arange(0, lines)[None, :]
        squares = base + rows * lines + tl.arange(0, rows)
        tl.store(sums + part * lot, acc)
        tl.store(squares + part * lot, total)
        tl.debug_barrier()  # all threads' stores, before one of them tells
        if tl.atomic_add(arrivals + cell, 1) < splits - 1:
            return
        tl.store(arrivals + cell, 0)  # for the next launch
        acc, total = tl.zeros_like(acc), tl.zeros_like(total)
        for i in tl.static_range(splits):
            acc += tl.load(sums + i * lot)
            total += tl.load(squares + i * lot)
    if norm is not None:
        acc *= tl.rsqrt(total / size + eps)[:, None]
    acc += start
    if gated:
        gate, up = tl.split(tl.reshape(acc, [rows, cols, 2]))
        acc = gate / (1 + tl.exp(-gate)) * up
    tl.store(where, acc.to(out.dtype.element_ty), mask=mine)


def _pick(name: str, x: Tensor, weight: Tensor) -> Tune | None:
    """The table's constants; None: the kernel is not for this."""
    count, size = x.shape[0], weight.numel()
    for tokens, millions, tune in TABLE[name] if count <= MOST else ():
        if count <= tokens and size <= millions * 1e6:
            # Tensor cores do not multiply float32, and x * norm_weight may be too much
            # for float16.
            half = x.dtype is torch.float16 and name != "linear_add"
            wide = tune is not None and tune[0] > 1 and (half or x.dtype is torch.float32)
            return None if wide else tune
    return None


def _run(
    name: str,
    tune: Tune | None,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Launch the kernel into `out`, or a new tensor; None: it is not for this."""
    (tokens, size), gated = x.shape, name == "norm_gated"
    columns, tune = len(weight) // (1 + gated), tune or _pick(name, x, weight)
    fits = tokens > 0 and size % 16 == columns % 16 == 0 and on_triton(x)
    if not (
        tune and fits and all(t is None or t.is_contiguous() for t in (x, weight, out))
    ):
        return None
    rows, cols, depth, splits, warps, stages = tune
    heights, tiles = triton.cdiv(tokens, rows), triton.cdiv(columns, cols)
    lines, passes = cols * (1 + gated), triton.cdiv(size, depth * splits)
    room = heights * tiles * splits * rows * (lines + 1)
    parts = x.new_empty(room, dtype=torch.float32) if splits > 1 else None
    counts = arrivals(x.device, heights * tiles) if splits > 1 else None
    out = x.new_empty(tokens, columns) if out is None else out
    few = lines * depth * passes * x.element_size() <= HELD * 32 * warps
    few = (
        few
        and weight.numel() <= HELD_WEIGHTS
        and (splits == 1 or size % (depth * splits) == 0)
    )
    held = passes if rows == stages == 1 and few else 0
    _linear[heights, tiles * splits](
        x,
        norm,
        weight,
        bias,
        out,
        parts,
        counts,
        eps,
        tokens,
        columns,
        gated,
        size,
        rows,
        cols,
        depth,
        splits,
        stages,
        held,
        num_warps=warps,
        launch_pdl=early(x),
    )
    return out


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    tune: Tune | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias: x [tokens, hidden], weight [out, hidden] -> [tokens,
    out].

    One dtype. Call it before a CUDA graph captures it. tune: constants instead of
    `TABLE`'s."""
    out = _run("norm_linear", tune, x, norm_weight, eps, weight, bias)
    return F.linear(rms_norm(x, norm_weight, eps), weight, bias) if out is None else out


def linear_add(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tune: Tune | None = None,
) -> None:
    """residual [tokens, out] += x [tokens, in] @ weight.T + bias. The rest is
    as above.
    """
    if _run("linear_add", tune, x, None, 0.0, weight, bias, residual) is None:
        plain.linear_add(residual, x, weight, bias)


def norm_gated(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up: Tensor,
    bias: Tensor | None = None,
    fused: bool = False,
    tune: Tune | None = None,
) -> Tensor:
    """silu(gate) * up of [gate, up] = rms_norm(x) @ gate_up.T + bias. The rest is as
    above.

    fused: gated.py serves it where that pays."""
    if (out := _run("norm_gated", tune, x, norm_weight, eps, gate_up, bias)) is not None:
        return out
    normed = rms_norm(x, norm_weight, eps)
    if fused and bias is None and pays(x.shape[0], gate_up.shape[0] // 2):
        return gated(normed, gate_up)
    return silu_mul(F.linear(normed, gate_up, bias))
