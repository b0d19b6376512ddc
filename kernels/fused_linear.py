"""A decode step's matrix products, fused with the norm before, or the gate or residual
addition after them.

Theory. For few tokens a product costs its weights' bytes / bandwidth and a launch, so
norm, gate and addition are fused: a layer takes 4 launches besides attention, not 8. x *
norm_weight is multiplied while its squares are summed; rsqrt(mean) scales the sums, which
rounds slightly differently from norm.py. One token (`rows` 1): weights times x in
float32, summed over lanes at the end. More: x is padded to the 16 rows of the tensor
cores, of which only existing ones are loaded. A latency near 0.8 us at 4.2 TB/s needs 25
KB in flight on each of 132 processors: for few columns, `splits` programs share a tile's
depth and store their sums; the last one adds all of them, in order. While the kernel
before runs (pdl.py), the first weights are loaded: to registers (HELD_BYTES), else to the
cache.
"""

import torch
import triton
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.activation import gated_mul
from minfer.kernels.gated import QUACK_ACTIVATIONS, gated, is_gated_faster
from minfer.kernels.leaves import Activation, Linear, Norm
from minfer.kernels.linear_kernels import product
from minfer.kernels.linear_tunes import LinearTune, tune_of
from minfer.kernels.norm import normalise
from minfer.kernels.pdl import arrivals, early

# Bytes of weights that a thread may hold when it starts to wait for x, if `stages` is 1
# and there are at most `HELD_WEIGHTS` weights: with more, programs run in waves, and only
# the first wave would gain.
HELD_BYTES = 256
HELD_WEIGHTS = 12e6
THREADS = 32  # of a warp


def norm_linear(
    x: Tensor, norm: Norm | None, matrix: Linear, tune: LinearTune | None = None
) -> Tensor:
    """normalise(x) @ weight.T + bias: x [tokens, hidden], weight [out, hidden] ->
    [tokens, out]; without a norm, of rows as they are.

    One dtype. Call it before a CUDA graph captures it. tune: constants instead of the
    table's (linear_tunes.py).
    """
    x, norm = normalised_before(x, norm)
    if norm is None:
        return linear(x, matrix, tune)
    tune = tune or tune_of("norm_linear", x, matrix.weight)
    if tune is not None and fits(x, matrix):
        return launch(x, matrix, tune, norm=norm)
    return plain.linear(normalise(x, norm), matrix)


def normalised_before(x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """Returns the rows and the norm that products take. Their kernel sums squares, but no
    means: rows with LayerNorm are normalised before.
    """
    if norm is None or not norm.centered:
        return x, norm
    return normalise(x, norm), None


def linear(x: Tensor, matrix: Linear, tune: LinearTune | None = None) -> Tensor:
    """x @ weight.T + bias; else as above."""
    tune = tune or tune_of("linear", x, matrix.weight)
    if tune is not None and fits(x, matrix):
        return launch(x, matrix, tune)
    return plain.linear(x, matrix)


def linear_add(
    residual: Tensor, x: Tensor, matrix: Linear, tune: LinearTune | None = None
) -> None:
    """residual [tokens, out] += x [tokens, in] @ weight.T + bias; else as above."""
    tune = tune or tune_of("linear_add", x, matrix.weight)
    if tune is not None and fits(x, matrix) and residual.is_contiguous():
        launch(x, matrix, tune, out=residual)
    else:
        plain.linear_add(residual, x, matrix)


def norm_gated(
    x: Tensor,
    norm: Norm | None,
    gate_up: Linear,
    activation: Activation = "silu",
    fused: bool = False,
    tune: LinearTune | None = None,
) -> Tensor:
    """activation(gate) * up of [gate, up] = normalise(x) @ gate_up.T + bias; else as
    above.

    fused: use gated.py where it is faster.
    """
    x, norm = normalised_before(x, norm)
    if activation == "silu":
        tune = tune or tune_of("norm_gated", x, gate_up.weight)
        if tune is not None and fits(x, gate_up, gated=True):
            return launch(x, gate_up, tune, norm=norm, gated=True)
    if fused and _suits_quack(x, gate_up, activation):
        return gated(_normalised(x, norm), gate_up, activation)
    if activation == "silu":
        return gated_mul(plain.linear(_normalised(x, norm), gate_up))
    return gated_mul(norm_linear(x, norm, gate_up), activation)


def _suits_quack(x: Tensor, gate_up: Linear, activation: Activation) -> bool:
    """Whether gated.py has such a product, and is faster."""
    has_it = gate_up.bias is None and activation in QUACK_ACTIVATIONS
    return has_it and is_gated_faster(x.shape[0], len(gate_up.weight) // 2)


def _normalised(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else normalise(x, norm)


def fits(x: Tensor, matrix: Linear, *, gated: bool = False) -> bool:
    """Whether the kernel takes such tensors: contiguous, with sizes that are multiples of
    16.
    """
    tokens, size = x.shape
    columns = len(matrix.weight) // (1 + gated)
    aligned = size % 16 == columns % 16 == 0
    are_contiguous = x.is_contiguous() and matrix.weight.is_contiguous()
    return tokens > 0 and aligned and are_contiguous and on_triton(x)


def launch(
    x: Tensor,
    matrix: Linear,
    tune: LinearTune,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    scaled: tuple[Tensor, torch.dtype] | None = None,
) -> Tensor:
    """Run the kernel into a new tensor, or add to `out`.

    scaled: the rows of x have scales [tokens], and the result has that dtype, not that of
    x.
    """
    weight, add = matrix.weight, out is not None
    tokens, size = x.shape
    columns = len(weight) // (1 + gated)
    row_tiles = triton.cdiv(tokens, tune.rows)
    column_tiles = triton.cdiv(columns, tune.columns)
    partial_sums = None
    counts = None
    if tune.splits > 1:
        tiles = row_tiles * column_tiles
        sums = tune.rows * (tune.columns * (1 + gated) + 1)  # of a program, and squares
        partial_sums = x.new_empty(tiles * tune.splits * sums, dtype=torch.float32)
        counts = arrivals(x.device, tiles)
    x_scales, dtype = (None, x.dtype) if scaled is None else scaled
    if out is None:
        out = x.new_empty(tokens, columns, dtype=dtype)
    product[row_tiles, column_tiles * tune.splits](
        x=x,
        x_scales=x_scales,
        norm=None if norm is None else norm.weight,
        weight=weight,
        scales=matrix.scales,
        extras=matrix.extras,
        bias=matrix.bias,
        out=out,
        partial_sums=partial_sums,
        arrivals=counts,
        eps=0.0 if norm is None else norm.eps,
        tokens=tokens,
        columns=columns,
        gated=gated,
        add=add,
        size=size,
        group=matrix.scheme.group,
        rows=tune.rows,
        cols=tune.columns,
        depth=tune.depth,
        splits=tune.splits,
        stages=tune.stages,
        held_passes=_held_passes(matrix, tune, gated=gated),
        swapped=tune.swapped,
        dequantized=tune.dequantized,
        num_warps=tune.warps,
        launch_pdl=early(x),
    )
    return out


def _held_passes(matrix: Linear, tune: LinearTune, *, gated: bool) -> int:
    """The number of passes whose weights a program holds before x is available: all, or
    none.
    """
    depth = tune.depth * tune.splits
    passes = triton.cdiv(matrix.inputs, depth)
    lines = tune.columns * (1 + gated)
    element = matrix.weight.element_size()
    bytes_held = lines * tune.depth * passes * element // matrix.scheme.numbers
    is_held = bytes_held <= HELD_BYTES * THREADS * tune.warps
    is_held = is_held and matrix.weight.numel() <= HELD_WEIGHTS
    divides_evenly = tune.splits == 1 or matrix.inputs % depth == 0
    return passes if tune.rows == tune.stages == 1 and is_held and divides_evenly else 0
