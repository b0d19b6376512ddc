"""Quantized matrices in plain torch: what each scheme of leaves.py means.

Theory. A number is stored in few bits, times a scale that some of them share: of an
output of the matrix (its numbers have like magnitudes), of 128 of an output's numbers, or
of a group of 32 to 128 where there are so few bits that one large number would leave the
others of its group no steps. The scale maps the largest magnitude to the largest number
(Dettmers et al. 2022 for rows of integers, Micikevicius et al. 2022 for FP8, Frantar et
al. 2022 for groups, Rouhani et al. 2023 for powers of two).

With both operands in 8 bits, activations are rounded alike, a row (token) at a time, or
in pieces of a row, so that a token's result does not depend on its neighbours. Products
of integers are summed exactly. With weights alone in few bits, activations stay as they
are, and the product is that with the dequantized matrix.

These are the references of the kernels, and the products of a device that has no better
ones. A matrix is dequantized in pieces, so that never more than
`MAX_DEQUANTIZED_NUMBERS` of its numbers take their full size.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from minfer.kernels import cpu_int4, cpu_int8, plain
from minfer.kernels.eight_bits import FP8, LARGEST, divide, to_8_bits
from minfer.kernels.leaves import (
    FP8_BLOCKS,
    INT8,
    MAX_DEQUANTIZED_NUMBERS,
    Activation,
    Linear,
    Norm,
    Packed,
    Scheme,
)

FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and from 8 on their negatives
FP4_EXPONENT: Final = 2  # of the largest, 6 = 1.5 * 2^2
BIAS: Final = 127  # of exponents in 8 bits
ZERO_POINT: Final = 8  # what means 0 in groups without zeros


class Stored(NamedTuple):
    """A matrix in its scheme's form."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None


def quantize(matrix: Tensor, scheme: Scheme, dtype: torch.dtype) -> Stored:
    """Returns a matrix [..., outputs, inputs], or several, rounded to the nearest numbers
    of a scheme. `dtype` is the activations'. Raises ValueError where groups do not divide
    the inputs.
    """
    if scheme is FP8_BLOCKS:
        return _in_blocks(matrix)
    groups, inputs = scheme.groups(matrix.shape[-1]), matrix.shape[-1]
    if inputs % groups:
        raise ValueError(f"{inputs} inputs are not divided by groups of {scheme.group}")
    wide = matrix.float().reshape(*matrix.shape[:-1], groups, -1)
    if scheme.bits == 8:
        weight, scales = _quantize_groups(wide, scheme)
        return Stored(weight.flatten(-2), scales.squeeze(-1))
    if scheme.scales == "uint8":
        return _microscaled(wide)
    if scheme.has_factors:
        return _scaled_in_fp8(wide)
    return _integers(wide, scheme, dtype)


def dequantize(matrix: Linear) -> Tensor:
    """Returns a leaf's matrix, or matrices, in float32."""
    scheme, weight = matrix.scheme, matrix.weight
    if scheme.is_plain:
        return weight.float()
    numbers = _unpacked(weight) if scheme.bits == 4 else weight
    wide, scales = numbers, matrix.scaled.float()
    if scheme.scales == "uint8":
        scales = torch.exp2(scales - BIAS)
    if matrix.factors is not None:
        scales = scales * matrix.factors
    if scheme.scales == "uint8" or scheme.has_factors:
        table = torch.tensor([*FP4, *(-number for number in FP4)], device=weight.device)
        wide = table[numbers.int()]
    wide = wide.float()
    size = scheme.group or matrix.inputs
    if scheme.is_int4:
        wide = wide - (
            ZERO_POINT
            if matrix.zeros is None
            else _repeat_groups(matrix.zeros, size, matrix.inputs)
        )
    return wide * _repeat_groups(scales, size, matrix.inputs)


def linear(x: Tensor, matrix: Linear) -> Tensor:
    """x @ weight.T + bias: [tokens, inputs] -> [tokens, outputs], in the dtype of `x`."""
    if matrix.packed is not None and not isinstance(matrix.packed, tuple):
        return matrix.packed.product(x, matrix.bias)
    rounded = round_activations(x, matrix.scheme)
    at_once = max(1, MAX_DEQUANTIZED_NUMBERS // matrix.inputs)
    rows = matrix.weight.shape[0]
    products = [
        _product(x, rounded, matrix.select(slice(i, min(i + at_once, rows))))
        for i in range(0, rows, at_once)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def prepare(matrix: Linear) -> Linear:
    """Returns a leaf, or that of several experts, as a library of the CPU stores it, if
    one multiplies it.
    """
    if matrix.weight.device.type != "cpu":
        return matrix
    single = matrix.weight.dim() == 2
    leaves = [matrix] if single else [matrix.select(i) for i in range(len(matrix.weight))]
    packed_leaves = [
        packed_leaf for leaf in leaves if (packed_leaf := _packed_leaf(leaf)) is not None
    ]
    if len(packed_leaves) < len(leaves):
        return matrix
    packed = packed_leaves[0] if single else tuple(packed_leaves)
    return evolve(
        matrix, weight=matrix.weight.to("meta"), scales=None, zeros=None, packed=packed
    )


def _packed_leaf(matrix: Linear) -> Packed | None:
    if matrix.scheme is INT8:
        return cpu_int8.pack(matrix.weight, matrix.scaled)
    return cpu_int4.pack(matrix) if matrix.scheme.is_int4 else None


def product_description(scheme: Scheme) -> str:
    """Returns what multiplies a scheme's matrices on the CPU."""
    if scheme is INT8:
        return cpu_int8.description()
    if scheme.is_int4:
        return cpu_int4.DESCRIPTION
    return "dequantized a piece at a time, then multiplied"


def norm_linear(x: Tensor, norm: Norm | None, matrix: Linear) -> Tensor:
    """`linear` of normalise(x), or of rows as they are."""
    return linear(x if norm is None else plain.normalise(x, norm), matrix)


def linear_add(residual: Tensor, x: Tensor, matrix: Linear) -> None:
    """residual [tokens, outputs] += x @ weight.T + bias."""
    residual.add_(linear(x, matrix))


def norm_gated(
    x: Tensor,
    norm: Norm | None,
    gate_up: Linear,
    activation: Activation = "silu",
    fused: bool = False,
) -> Tensor:
    """activation(gate) * up, as `plain.norm_gated`."""
    del fused
    return plain.gated_mul(norm_linear(x, norm, gate_up), activation)


gated_mul = plain.gated_mul


def round_activations(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor] | None:
    """Returns activations [tokens, inputs] as a scheme rounds them, in its storage, and
    their scales [tokens, groups] float32; None: they stay as they are.
    """
    if scheme.activations == "as they are":
        return None
    size = scheme.group if scheme.activations == "groups" else x.shape[-1]
    padded = F.pad(x.float(), (0, -x.shape[-1] % size))
    pieces = padded.view(len(x), padded.shape[1] // size, size)  # there may be no tokens
    numbers, scales = _quantize_groups(pieces, scheme)
    return numbers.flatten(-2)[..., : x.shape[-1]], scales.squeeze(-1)


def _product(x: Tensor, rounded: tuple[Tensor, Tensor] | None, matrix: Linear) -> Tensor:
    """The product with some outputs of a leaf, all of whose inputs are there."""
    if rounded is None:
        kind = x.dtype if x.is_cuda or len(x) == 1 else plain.product_dtype(x.dtype)
        weight = dequantize(matrix).to(x.dtype).to(kind)
        bias = None if matrix.bias is None else matrix.bias.to(kind)
        return F.linear(x.to(kind), weight, bias).to(x.dtype)
    numbers, scales = rounded
    if matrix.scheme.group:
        wide = numbers.float() * _repeat_groups(
            scales, matrix.scheme.group, matrix.inputs
        )
        total = F.linear(wide, dequantize(matrix))
    else:
        # Sums of integers are exact in float64.
        kind = torch.float64 if matrix.scheme.storage == "int8" else torch.float32
        sums = F.linear(numbers.to(kind), matrix.weight.to(kind))
        total = sums.float() * scales * matrix.scaled.t()
    return (total if matrix.bias is None else total + matrix.bias.float()).to(x.dtype)


def _quantize_groups(wide: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns numbers of 8 bits and the scales [..., 1] of their last dimension."""
    dtype: torch.dtype = getattr(torch, scheme.storage)
    scales = _scales(wide.abs().amax(-1, keepdim=True), dtype)
    return to_8_bits(wide / scales, dtype), scales


def _scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales of numbers whose largest magnitudes are given; 1 for zeros."""
    scales = divide(largest, LARGEST[dtype])
    return torch.where(largest > 0, scales, torch.ones_like(scales))


def _in_blocks(matrix: Tensor) -> Stored:
    """Returns a matrix in FP8, each 128 x 128 of its numbers with one scale, stored for
    each output.
    """
    *count, outputs, inputs = matrix.shape
    size = 128
    padded = F.pad(matrix.float(), (0, -inputs % size, 0, -outputs % size))
    down, across = padded.shape[-2] // size, padded.shape[-1] // size
    tiles = padded.view(*count, down, size, across, size)
    largest = tiles.abs().amax((-3, -1))  # [..., blocks of outputs, of inputs]
    by_output = (
        _scales(largest, FP8).repeat_interleave(size, -2)[..., :outputs, :].contiguous()
    )
    wide = matrix.float() / _repeat_groups(by_output, size, inputs)
    weight = to_8_bits(wide, FP8)
    return Stored(weight.view(*count, outputs, inputs), by_output)


def _integers(wide: Tensor, scheme: Scheme, dtype: torch.dtype) -> Stored:
    """Returns integers of 4 bits of groups [..., groups, group]."""
    if scheme.zeros:
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scales = divide(high - low, 15).to(dtype)
        zeros = (-low / _nonzero(scales)).round().clamp(0, 15)
    else:
        # The number of the largest magnitude is -8 or 7, whichever leaves no clipping.
        high, low = wide.amax(-1), wide.amin(-1)
        scales = torch.maximum(divide(high, 7), -low / 8).to(dtype)
        zeros = torch.full_like(scales, ZERO_POINT, dtype=torch.float32)
    steps = wide / _nonzero(scales)[..., None]
    numbers = (steps + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    stored_zeros = zeros.to(torch.uint8) if scheme.zeros else None
    return Stored(packed(numbers.flatten(-2)), scales, stored_zeros)


def _nonzero(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide == 0, torch.ones_like(wide), wide)


def _microscaled(wide: Tensor) -> Stored:
    """Returns FP4 numbers of groups [..., groups, 32], and their exponents."""
    largest = wide.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - FP4_EXPONENT
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    exponent = exponent.clamp(-BIAS, BIAS)
    numbers = _nearest_fp4(wide / torch.exp2(exponent.float())[..., None])
    return Stored(packed(numbers.flatten(-2)), (exponent + BIAS).to(torch.uint8))


def _scaled_in_fp8(wide: Tensor) -> Stored:
    """Returns FP4 numbers of groups [..., groups, 16], their scales in FP8, and a factor
    of each output, for which its largest scale is the largest of FP8.
    """
    scales = divide(wide.abs().amax(-1), FP4[-1])
    factors = _scales(scales.amax(-1, keepdim=True), FP8)
    rounded = to_8_bits(scales / factors, FP8)
    numbers = _nearest_fp4(wide / _nonzero(rounded.float() * factors)[..., None])
    return Stored(packed(numbers.flatten(-2)), rounded, factors=factors)


def _nearest_fp4(scaled: Tensor) -> Tensor:
    """Returns the codes of the nearest FP4 numbers, uint8."""
    absolute = scaled.abs().clamp(max=FP4[-1]).contiguous()
    table = torch.tensor(FP4, device=scaled.device)
    between = (table[1:] + table[:-1]) / 2
    size = torch.bucketize(absolute, between)
    # Halfway, the number with an even last bit is meant.
    down = torch.bucketize(absolute, between, right=True)
    size = torch.where(size % 2 == 0, size, down)
    return (size + 8 * (scaled < 0)).to(torch.uint8)


def packed(numbers: Tensor) -> Tensor:
    """Returns numbers of 4 bits [..., inputs], two in a byte."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _unpacked(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def _repeat_groups(groups: Tensor, size: int, inputs: int) -> Tensor:
    """Returns the value of each input's group."""
    return groups.repeat_interleave(size, -1)[..., :inputs]
