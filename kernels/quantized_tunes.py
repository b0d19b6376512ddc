"""Constants of products with quantized matrices, from measurements.

Best of 12 to 24 candidates at the products of Qwen2.5-7B on an H100, in CUDA graphs over
220 MB of weights (2026-11-27), for groups of 128 first and of 32 second. A layer's four
products take at one token 93 us in FP8 and 92 in 4 bits (bf16: 170), at 8 tokens 108 and
97 (195), at 64 tokens 126 in FP8 (160 by the library).
"""

from typing import Final

import torch
from torch import Tensor

from minfer.kernels.leaves import Linear, Scheme
from minfer.kernels.linear_tunes import LinearTune, TuneEntry

# The most tokens for which norms are computed in each program of a product.
MAX_FUSED_NORM_TOKENS: Final = 16
# By the bits of numbers, and whether gates follow. tokens: the most of the kernel; with
# more, libraries multiply. The first row that fits is used; if none does, libraries
# multiply as well.
TABLE: Final[dict[tuple[int, bool], list[TuneEntry]]] = {
    # tokens, millions of weights; rows, columns, depth, splits, warps, stages
    (8, False): [
        TuneEntry(1, 14, LinearTune(1, 4, 1024, 1, 2, 2)),
        TuneEntry(1, 20, LinearTune(1, 4, 512, 1, 1, 4)),
        TuneEntry(1, 9999, LinearTune(1, 4, 1024, 1, 2, 2)),
        TuneEntry(16, 14, LinearTune(16, 64, 128, 6, 4, 6)),
        TuneEntry(16, 20, LinearTune(16, 64, 128, 4, 4, 6)),
        TuneEntry(16, 9999, LinearTune(16, 32, 256, 4, 4, 4)),
    ],
    (8, True): [
        TuneEntry(1, 9999, LinearTune(1, 2, 512, 1, 1, 4)),
        TuneEntry(16, 9999, LinearTune(16, 32, 128, 1, 4, 4)),
    ],
    (4, False): [
        TuneEntry(1, 20, LinearTune(1, 4, 1024, 1, 1, 2)),
        TuneEntry(16, 14, LinearTune(16, 128, 128, 6, 8, 4)),
        TuneEntry(16, 20, LinearTune(16, 64, 128, 4, 2, 4)),
        TuneEntry(16, 9999, LinearTune(16, 128, 128, 8, 8, 4)),
        TuneEntry(64, 14, LinearTune(64, 64, 128, 3, 4, 4)),
        TuneEntry(64, 20, LinearTune(64, 128, 128, 4, 4, 3)),
        TuneEntry(64, 9999, LinearTune(64, 64, 128, 4, 4, 4)),
    ],
    (4, True): [
        TuneEntry(1, 9999, LinearTune(1, 2, 512, 1, 1, 2)),
        TuneEntry(16, 9999, LinearTune(16, 64, 128, 1, 4, 4)),
        TuneEntry(64, 9999, LinearTune(64, 32, 128, 1, 4, 4)),
    ],
}
# Of FP8, with rows rounded to FP8 as well, by whether gates follow. With more tokens the
# library is as fast, or in a whole step faster.
ROUNDED_TABLE: Final[dict[bool, list[TuneEntry]]] = {
    False: [
        TuneEntry(32, 14, LinearTune(32, 64, 256, 3, 4, 4, swapped=True)),
        TuneEntry(32, 20, LinearTune(32, 64, 256, 2, 4, 4, swapped=True)),
        TuneEntry(32, 9999, LinearTune(32, 128, 256, 4, 4, 3, swapped=True)),
        TuneEntry(64, 14, LinearTune(64, 64, 128, 3, 4, 6)),
        TuneEntry(64, 20, LinearTune(64, 64, 128, 2, 4, 6)),
        TuneEntry(64, 9999, LinearTune(64, 64, 128, 4, 4, 6)),
    ],
    True: [
        TuneEntry(32, 9999, LinearTune(32, 32, 256, 1, 4, 4, swapped=True)),
        TuneEntry(64, 9999, LinearTune(64, 32, 128, 1, 4, 6)),
    ],
}
# Of FP8 in blocks: with more tokens, the library multiplies where it takes the matrix
# (fp8_blocks.py). On an H200 (2026-12-01), with rounding, it takes 12.2 us for 64 tokens
# and 25 million weights, where the kernel takes 21.0 and dequantizing 35.7; for 8.4
# million 17.7, 12.2 and 13.4; for 8,192 tokens 357 and 142, dequantizing 627 and 182.
MAX_BLOCKS_TOKENS: Final = 64
# Of matrices of more weights than this.
LARGE_BLOCKS: Final = 16_000_000
MAX_LARGE_BLOCKS_TOKENS: Final = 16
# Of FP8 in blocks, without gates. The kernel takes more tokens than in INT8, as without a
# library the matrix would be dequantized. Measured at the products of Qwen3-Next-80B-A3B,
# of 25, 8.4, 2.1 and 1.0 million weights, on an H200 (`bench.fp8_blocks_tunes_gpu`): 16.4
# us together at one token (22 with the tunes above), 27 (39) at 8, 42 (61) at 64; the
# floor is 8.6.
FP8_BLOCKS_TABLE: Final[list[TuneEntry]] = [
    TuneEntry(1, 30, LinearTune(1, 4, 512, 1, 2, 1)),
    TuneEntry(1, 9999, LinearTune(1, 4, 1024, 1, 2, 2)),
    TuneEntry(16, 1.5, LinearTune(16, 32, 128, 1, 4, 3)),
    TuneEntry(16, 4, LinearTune(16, 32, 128, 4, 4, 3)),
    TuneEntry(16, 14, LinearTune(16, 64, 128, 6, 4, 6)),
    TuneEntry(16, 30, LinearTune(16, 64, 128, 4, 4, 3)),
    TuneEntry(16, 9999, LinearTune(16, 32, 256, 4, 4, 4)),
    TuneEntry(64, 1.5, LinearTune(64, 32, 256, 1, 4, 3)),
    TuneEntry(64, 4, LinearTune(64, 32, 256, 4, 4, 3)),
    TuneEntry(64, 14, LinearTune(64, 32, 128, 4, 4, 5)),
    TuneEntry(64, 9999, LinearTune(64, 64, 128, 1, 4, 3, swapped=True)),
]
# With gates.
FP8_BLOCKS_GATED: Final = [
    *TABLE[8, True],
    TuneEntry(64, 9999, LinearTune(32, 64, 128, 2, 4, 4)),
]


def max_blocks_tokens(matrix: Linear) -> int:
    """The most tokens for which the kernel multiplies a leaf of FP8 in blocks that the
    library takes as well.
    """
    is_large = matrix.weight.numel() > LARGE_BLOCKS
    return MAX_LARGE_BLOCKS_TOKENS if is_large else MAX_BLOCKS_TOKENS


def tune_of(x: Tensor, matrix: Linear, *, gated: bool = False) -> LinearTune | None:
    """The constants for x [tokens, inputs] and a leaf; None: a library multiplies."""
    if x.dtype is torch.float32:  # which tensor cores do not multiply
        return None
    return _first_fitting(_table_rows(matrix.scheme, gated=gated), x, matrix)


def rounded_tune_of(
    x: Tensor, matrix: Linear, *, gated: bool = False
) -> LinearTune | None:
    """As `tune_of`, for rows that are rounded to 8 bits."""
    scheme = matrix.scheme
    if scheme.storage != "float8_e4m3fn" or scheme.activations != "rows":
        return None
    return _first_fitting(ROUNDED_TABLE[gated], x, matrix)


def _table_rows(scheme: Scheme, *, gated: bool) -> list[TuneEntry]:
    if scheme.activations == "groups":
        return FP8_BLOCKS_GATED if gated else FP8_BLOCKS_TABLE
    return TABLE[scheme.bits, gated]


def _first_fitting(rows: list[TuneEntry], x: Tensor, matrix: Linear) -> LinearTune | None:
    """The first row that takes x and the leaf."""
    millions = matrix.weight.numel() * matrix.scheme.numbers / 1e6
    for row in rows:
        if len(x) <= row.tokens and millions <= row.millions:
            return row.tune
    return None
