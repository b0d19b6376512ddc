"""Compile the kernels of quantized matrices for a Hopper GPU where there is none, as
`compiles.py` does others: `python -m tests.kernels.compiles_quantized`. With `--few`,
products, which take longest, are left out.
"""

import sys

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.kernels import experts, fused_linear, quantized_linear
from minfer.kernels.experts_tunes import (
    FP8_BLOCKS_FEW_TOKENS,
    QUANTIZED_FEW_TOKENS,
    QUANTIZED_GROUPED_TABLE,
    ExpertsTune,
    FewTokensTune,
)
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT8,
    MXFP4,
    NVFP4,
    ChosenExperts,
    Experts,
    Linear,
    Norm,
    Scheme,
    int4,
)
from minfer.kernels.linear_tunes import LinearTune
from minfer.kernels.quantized_kernels import (
    dequantized,
    round_groups,
    round_rows,
    scaled_sums,
)

from .compiles import HIDDEN, HOPPER, INNER, QKV, compiled, half, ints
from .specialization import Elsewhere

SCHEMES = (
    FP8,
    FP8_BLOCKS,
    INT8,
    int4(128),
    int4(32),
    int4(128, zeros=True),
    MXFP4,
    NVFP4,
)


def leaf(scheme: Scheme, *shape: int, bias: bool = False) -> Linear:
    *count, outputs, inputs = shape
    groups = scheme.groups(inputs)
    scales = torch.empty(
        *count,
        outputs,
        groups,
        dtype=getattr(torch, scheme.scales) if scheme.scales else torch.bfloat16,
    )
    zeros = torch.empty(*count, outputs, groups, dtype=torch.uint8)
    storage = getattr(torch, scheme.storage)
    return Linear(
        weight=torch.empty(*count, outputs, inputs // scheme.numbers, dtype=storage),
        bias=half(*count, outputs) if bias else None,
        scheme=scheme,
        scales=scales,
        zeros=zeros if scheme.zeros else None,
        factors=torch.empty(*count, outputs, 1) if scheme.has_factors else None,
        parts=(outputs,),
    )


def products(scheme: Scheme, tokens: int) -> None:
    x, norm = half(tokens, HIDDEN), Norm(half(HIDDEN), 1e-6)
    quantized_linear.norm_linear(x, norm, leaf(scheme, QKV, HIDDEN, bias=True))
    quantized_linear.linear_add(x, half(tokens, INNER), leaf(scheme, HIDDEN, INNER))
    quantized_linear.norm_gated(x, norm, leaf(scheme, 2 * INNER, HIDDEN))


def mixture(scheme: Scheme, tokens: int, tune: ExpertsTune) -> None:
    """A layer of Qwen3-30B-A3B, or of gpt-oss-20b with biases."""
    big = scheme is MXFP4
    hidden, inter, top_k = (2880, 2880, 4) if big else (2048, 768, 8)
    layer = Experts(
        gate_up=leaf(scheme, 2, 2 * inter, hidden, bias=big),
        down=leaf(scheme, 2, hidden, inter, bias=big),
        activation="clamped" if big else "silu",
    )
    choice = ChosenExperts(ints(tokens, top_k), torch.ones(tokens, top_k))
    x = half(tokens, hidden)
    experts.add_experts(x, x, layer, choice, tune)


def few_tokens(scheme: Scheme) -> FewTokensTune:
    if scheme is FP8_BLOCKS:
        return FP8_BLOCKS_FEW_TOKENS
    return QUANTIZED_FEW_TOKENS[scheme.bits]


def many_tokens(scheme: Scheme) -> None:
    """Large tiles, of dequantized weights, or of integers."""
    if scheme is INT8:
        rows, sums = torch.empty(256, HIDDEN, dtype=torch.int8), ints(256, QKV)
        tune, scales = LinearTune(128, 128, 128, 1, 8, 3), torch.empty(256, 1)
        matrix = leaf(scheme, QKV, HIDDEN, bias=True)
        scaled_sums(sums, scales, matrix, torch.bfloat16)
        scaled_sums(sums, scales, matrix, torch.bfloat16, half(256, QKV))
        fused_linear.launch(rows, matrix, tune, scaled=(scales, torch.bfloat16))
    elif scheme.group:
        tune = LinearTune(128, 128, 64, 2, 8, 4, swapped=True, dequantized=True)
        x, out = half(256, INNER), half(256, HIDDEN)
        fused_linear.launch(x, leaf(scheme, HIDDEN, INNER), tune, out=out)
        gate_up = leaf(scheme, 2 * INNER, HIDDEN)
        tune = tune._replace(columns=64, splits=1)
        fused_linear.launch(out, gate_up, tune, gated=True)


def multiplied(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    """Instead of cuBLAS."""
    return x.new_empty(len(x), len(weight))


def main(skip_slow: bool) -> None:
    driver.set_active(Elsewhere(HOPPER))
    JITFunction.run = compiled
    kernels.interpreting = True  # kernels take tensors of the CPU
    setattr(torch.nn.functional, "linear", multiplied)  # noqa: B010  # of another type
    for scheme in SCHEMES:
        dequantized(leaf(scheme, QKV, HIDDEN), half(1, HIDDEN))
        if skip_slow:
            continue
        for tokens in (1, 16, 33):
            products(scheme, tokens)
        many_tokens(scheme)
        mixture(scheme, 1, few_tokens(scheme))
        for row in QUANTIZED_GROUPED_TABLE:
            mixture(scheme, 4, row.tune)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        round_rows(half(512, INNER), dtype)
        round_rows(half(512, INNER), dtype, activation="ungated_gelu")
        round_rows(half(512, HIDDEN), dtype, Norm(half(HIDDEN), 1e-6))
    fp8, norm = torch.float8_e4m3fn, Norm(half(HIDDEN), 1e-6)
    round_groups(half(512, INNER), fp8, FP8_BLOCKS.group)
    round_groups(half(512, HIDDEN), fp8, FP8_BLOCKS.group, norm, rows=512)
    round_groups(half(512, INNER), fp8, FP8_BLOCKS.group, activation="silu", rows=512)


if __name__ == "__main__":
    main(skip_slow="--few" in sys.argv)
