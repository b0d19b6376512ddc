"""Products with quantized matrices on the GPU: the functions of plain.py.

Theory. Few tokens: a product costs the bytes of its weights, so they are read as they are
stored, and decoded in registers (leaf_tiles.py) by the kernel of fused_linear.py, with
norm, gate and addition fused as there. Activations stay as they are, which schemes of 8
bits round with many tokens: that is more exact, and memory is the limit. From two tokens
on, and for 4 bits from one, the tensor cores multiply: 31 weights of 4 bits arrive at a
processor in a clock, which leaves 4 of its instructions to each, and a float32
multiplication with its conversions takes 8.

Many tokens, in 8 bits: activations are rounded to 8 bits by one kernel with the norm
inside, a row at a time, or in FP8 with blocks a group of a row. Up to 64 rows of FP8 with
one scale an output are multiplied by the kernel of few tokens as well, more by a library:
FP8 by `torch._scaled_mm`, or with blocks as fp8_blocks.py says; INT8 by `torch._int_mm`,
whose integer sums are exact, and are scaled by one kernel. In other schemes, and where
those libraries do not take the sizes, the dtype or the GPU, the matrix is
dequantized into a tensor that lives as long as the product, and cuBLAS multiplies: of a
matrix in 4 bits that moves 4.5 bytes of memory for each number instead of a half. The
kernel of few tokens has large tiles for that case (`LinearTune.dequantized`), which the
table does not choose yet: they are to be measured (bench/quantized_tunes_gpu.py).
quantized_tunes.py has the numbers of tokens between them, and the constants.
"""

import torch
from attrs import evolve
from torch import Tensor

from minfer.kernels import activation as gates
from minfer.kernels import fp8_blocks, fused_linear
from minfer.kernels.leaves import PLAIN, Activation, Linear, Norm
from minfer.kernels.linear_tunes import LinearTune
from minfer.kernels.norm import normalise
from minfer.kernels.quantized_kernels import dequantized, round_rows, scaled_sums
from minfer.kernels.quantized_tunes import (
    MAX_FUSED_NORM_TOKENS,
    max_blocks_tokens,
    rounded_tune_of,
    tune_of,
)

MIN_INT_MM_ROWS = 17  # of `torch._int_mm`

gated_mul = gates.gated_mul


def prepare(matrix: Linear) -> Linear:
    """Returns a leaf, whose tensors are filled, with what a library multiplies with
    besides.
    """
    return evolve(matrix, blocks=fp8_blocks.scales_of_blocks(matrix))


def norm_linear(
    x: Tensor, norm: Norm | None, matrix: Linear, tune: LinearTune | None = None
) -> Tensor:
    """normalise(x) @ weight.T + bias: [tokens, inputs] -> [tokens, outputs], in the dtype
    of x; without a norm, of rows as they are.

    Call it before a CUDA graph captures it. tune: constants instead of the table's.
    """
    x, norm = fused_linear.normalised_before(x, norm)
    tune = tune or _few_tokens_tune(x, matrix)
    if tune is not None and fused_linear.fits(x, matrix):
        return _product_of_few_tokens(x, norm, matrix, tune)
    if _has_8_bit_library(x, matrix):
        return _rounded_product(x, norm, matrix)
    return fused_linear.norm_linear(x, norm, _dequantized(matrix, x))


def linear(x: Tensor, matrix: Linear, tune: LinearTune | None = None) -> Tensor:
    """x @ weight.T + bias; else as above."""
    tune = tune or _few_tokens_tune(x, matrix)
    if tune is not None and fused_linear.fits(x, matrix):
        return _product_of_few_tokens(x, None, matrix, tune)
    if _has_8_bit_library(x, matrix):
        return _rounded_product(x, None, matrix)
    return fused_linear.linear(x, _dequantized(matrix, x))


def linear_add(
    residual: Tensor, x: Tensor, matrix: Linear, tune: LinearTune | None = None
) -> None:
    """residual [tokens, outputs] += x @ weight.T + bias; else as above."""
    tune = tune or _few_tokens_tune(x, matrix)
    if tune is not None and fused_linear.fits(x, matrix) and residual.is_contiguous():
        fused_linear.launch(x, matrix, tune, out=residual)
    elif _has_8_bit_library(x, matrix):
        _rounded_product(x, None, matrix, out=residual)
    else:
        fused_linear.linear_add(residual, x, _dequantized(matrix, x))


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
    x, norm = fused_linear.normalised_before(x, norm)
    tune = tune or _few_tokens_tune(x, gate_up, gated=True)
    silu = activation == "silu"
    if tune is not None and silu and fused_linear.fits(x, gate_up, gated=True):
        return _product_of_few_tokens(x, norm, gate_up, tune, gated=True)
    if tune is not None and not silu:
        return gated_mul(norm_linear(x, norm, gate_up), activation)
    if _has_8_bit_library(x, gate_up):
        if silu and _rounded_tune(x, gate_up, gated=True):
            return _rounded_product(x, norm, gate_up, gated=True)
        return gated_mul(_rounded_product(x, norm, gate_up), activation)
    return fused_linear.norm_gated(x, norm, _dequantized(gate_up, x), activation, fused)


def feed(
    out: Tensor,
    x: Tensor,
    norm: Norm | None,
    gate_up: Linear,
    down: Linear,
    activation: Activation = "silu",
    fused: bool = False,
) -> None:
    """out [tokens, outputs] += norm_gated(x) @ down.T + bias, of leaves of one scheme.

    Where gate and up are a tensor, their product is rounded to 8 bits as it is made.
    """
    uses_library = (
        _few_tokens_tune(x, gate_up, gated=True) is None
        and _few_tokens_tune(x, down) is None
    )
    has_separate_gate = (
        _rounded_tune(x, gate_up, gated=True) is None or activation != "silu"
    )
    if (
        uses_library
        and has_separate_gate
        and _has_8_bit_library(x, gate_up)
        and _has_8_bit_library(x, down)
    ):
        gate_and_up = _rounded_product(*fused_linear.normalised_before(x, norm), gate_up)
        rows = _rounded(gate_and_up, down, activation=activation)
        _product_of_rounded(*rows, x, down, out=out)
    else:
        linear_add(out, norm_gated(x, norm, gate_up, activation, fused), down)


def _few_tokens_tune(
    x: Tensor, matrix: Linear, *, gated: bool = False
) -> LinearTune | None:
    """The constants of the kernel of few tokens; None: it does not take such a leaf, or
    another way is faster.
    """
    return None if _suits_blocks(x, matrix) else tune_of(x, matrix, gated=gated)


def _suits_blocks(x: Tensor, matrix: Linear) -> bool:
    """Whether fp8_blocks.py has such a product, and is faster."""
    return len(x) > max_blocks_tokens(matrix) and fp8_blocks.takes(x, matrix)


def _product_of_few_tokens(
    x: Tensor, norm: Norm | None, matrix: Linear, tune: LinearTune, *, gated: bool = False
) -> Tensor:
    """The product by the kernel of few tokens, with the norm inside if there are so few
    that it is worth to compute it in each program, and if float16 does not overflow.
    """
    fuses_norm = len(x) <= MAX_FUSED_NORM_TOKENS and (
        x.dtype is not torch.float16 or tune.rows == 1
    )
    if norm is not None and not fuses_norm:
        x, norm = normalise(x, norm), None
    return fused_linear.launch(x, matrix, tune, norm=norm, gated=gated)


def _has_8_bit_library(x: Tensor, matrix: Linear) -> bool:
    """Whether a library multiplies numbers of 8 bits of such sizes."""
    if _suits_blocks(x, matrix):
        return True
    if matrix.scheme.activations != "rows" or not x.is_cuda:
        return False
    outputs, inputs = matrix.weight.shape
    if matrix.scheme.storage == "int8":
        return len(x) >= MIN_INT_MM_ROWS and inputs % 8 == outputs % 8 == 0
    aligned = inputs % 16 == outputs % 16 == 0
    return len(x) > 0 and aligned and x.dtype is torch.bfloat16


def _rounded_tune(x: Tensor, matrix: Linear, *, gated: bool) -> LinearTune | None:
    """Returns the constants of the kernel of few tokens for rows that are rounded to 8
    bits; None if it does not take such sizes, or a library is faster.
    """
    fits = fused_linear.fits(x, matrix, gated=gated)
    return rounded_tune_of(x, matrix, gated=gated) if fits else None


def _rounded_product(
    x: Tensor,
    norm: Norm | None,
    matrix: Linear,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the product [tokens, outputs] with rows [tokens, inputs] that are rounded
    to 8 bits, normalised first if `norm` is given; else as `_product_of_rounded`.
    """
    rows = _rounded(x, matrix, norm)
    return _product_of_rounded(*rows, x, matrix, gated=gated, out=out)


def _rounded(
    x: Tensor,
    matrix: Linear,
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns rows in 8 bits, and their scales, as the product with a leaf takes them;
    else as `round_rows`.
    """
    if x.stride(1) != 1:  # kernels that round take rows with numbers side by side
        x = x.contiguous()
    if matrix.blocks is not None:
        return fp8_blocks.rounded(x, norm, activation)
    return round_rows(x, matrix.weight.dtype, norm, activation)


def _product_of_rounded(
    numbers: Tensor,
    scales: Tensor,
    x: Tensor,
    matrix: Linear,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the product [tokens, outputs] of `_rounded` rows, in the dtype of `x`, of
    which there are as many as tokens; it is added to `out`, if given. `gated`: only where
    `_rounded_tune` has constants.
    """
    together = out is None or out.is_contiguous()
    tune = _rounded_tune(numbers, matrix, gated=gated) if together else None
    if tune is not None:
        scaled = scales, x.dtype
        return fused_linear.launch(
            numbers, matrix, tune, gated=gated, out=out, scaled=scaled
        )
    if matrix.blocks is not None:
        total = fp8_blocks.product(numbers, scales, matrix, matrix.blocks)[: len(x)]
    elif matrix.scheme.storage == "int8":
        sums = torch._int_mm(numbers, matrix.weight.t())
        if together:
            return scaled_sums(sums, scales, matrix, x.dtype, out)
        total = scaled_sums(sums, scales, matrix, x.dtype)
    else:
        total = torch._scaled_mm(
            numbers,
            matrix.weight.t(),
            scales,
            matrix.scaled.view(1, -1),
            bias=matrix.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    return total if out is None else out.add_(total)


def _dequantized(matrix: Linear, x: Tensor) -> Linear:
    """The leaf with its matrix in the dtype of x."""
    weight = dequantized(matrix, x)
    return evolve(
        matrix, weight=weight, scheme=PLAIN, scales=None, zeros=None, factors=None
    )
