"""Constants of the kernel of fused_linear.py for each product, from measurements.

Best of 875 candidates at the shapes of Qwen2.5 0.5B, 1.5B and 7B on an H200, in CUDA
graphs over 220 MB of weights (2026-11-20). Compared with separate norm, cuBLAS and
activation, a step's products take at 1 token 0.58, 0.69 and 0.86 of the time, at 16
tokens 0.95, 0.98 and 0.96. The best isolated choice for 2 tokens and the 7B's products
made a whole step slower, 5.60 ms instead of 4.55 with that for 3 and 4 (2026-11-23), and
is left out.

Rows for more than 2,048 inputs, and for products whose result is not added (a rank's part
of a sum), are of candidates at the shapes of 2 and 4 ranks of the 7B, 32B and 72B on an
H100 (2026-11-28). There cuBLAS is faster than the kernel from 2 tokens on if nothing is
added; gate and up took up to 1.55 times as long with the rows for fewer inputs.

Rows for more than 4,096 inputs up to 45, 30 and 100 million weights, and of gate and up
beyond 150, are of up to 86 candidates at the shapes of Phi-4 on an H200 (2026-11-30;
bench/linear_tunes_gpu.py), the best of them together in graphs of three layers. The rows
that served before took 1.07 times as long at 1 token and 1.2 times at 2 to 16: programs
for gate and up filled 2.1 waves, and took 1.3 times as long as cuBLAS. The fastest tiling
of Phi-4's qkv for 2 to 16 tokens, 0.96 of cuBLAS's time, takes 207 KB of shared memory,
which GPUs before Hopper do not have, and is left out.

Rows for more than 3,584 inputs, and of 60 million weights for more than 4,096, are of as
many candidates at the shapes of Qwen3.5 9B (2026-12-01; the same script). In a step of 8
rows its layers' four products take 119 us instead of 143, and single tokens' second and
last products 38 us instead of 43. Two others, which were the fastest by themselves and
together, took 14 us longer in steps of one token, and are left out: their programs have
one warp. The fastest tilings of the last product need more than the 99 KB of shared
memory of smaller GPUs, for 1 % of its time: one with fewer stages is here.

Rows of Qwen2.5 7B for 2 to 16 tokens were found anew there: with swapped operands a
layer's products take 130 us instead of 138 in graphs of three layers (cuBLAS: 138). Whole
steps were not timed yet.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Product = Literal["norm_linear", "linear", "linear_add", "norm_gated"]


class LinearTune(NamedTuple):
    """The tiling of a product into programs."""

    rows: int  # of a program. 1: a token each; else, in `TABLE`, at least all tokens
    columns: int  # of a program
    # Of a pass along the summed dimension. A warp's share is at least 256 for one row,
    # else 64, or loads change their layout.
    depth: int
    splits: int  # programs that share a tile's depth
    warps: int
    stages: int
    swapped: bool = False  # weights are the first operand of the tensor cores
    dequantized: bool = False  # products are with scaled weights (leaf_tiles.py)


class TuneEntry(NamedTuple):
    """A row of the table: its limits, and the tune."""

    tokens: int  # at most
    millions: float  # of weights, at most
    tune: LinearTune | None  # None: cuBLAS is faster
    above: int = 0  # it is for more inputs than this


MAX_TOKENS: Final = 16  # of any row of the table
# The first row that fits is used; if none does, cuBLAS.
TABLE: Final[dict[Product, list[TuneEntry]]] = {
    # tokens, millions of weights; rows, columns, depth, splits, warps, stages
    "norm_linear": [
        TuneEntry(4, 2, LinearTune(1, 2, 512, 1, 2, 1)),
        TuneEntry(1, 8.5, LinearTune(1, 1, 512, 1, 1, 1), above=2048),
        TuneEntry(4, 8, LinearTune(1, 4, 256, 1, 1, 4)),
        TuneEntry(1, 45, LinearTune(1, 2, 512, 1, 2, 4), above=4096),
        TuneEntry(1, 99, LinearTune(1, 4, 256, 1, 1, 4)),
        TuneEntry(16, 999, None, above=4096),
        TuneEntry(16, 55, LinearTune(16, 64, 128, 2, 8, 3, swapped=True), above=3584),
    ],
    "linear": [
        TuneEntry(2, 1.5, LinearTune(1, 2, 1024, 1, 4, 1)),
        TuneEntry(4, 1.5, LinearTune(1, 4, 512, 1, 2, 1)),
        TuneEntry(1, 999, LinearTune(1, 2, 2048, 1, 8, 1)),
        TuneEntry(16, 1.5, LinearTune(16, 16, 256, 4, 2, 4)),
    ],
    "linear_add": [
        TuneEntry(2, 1.5, LinearTune(1, 2, 1024, 1, 4, 1)),
        TuneEntry(1, 3, LinearTune(1, 2, 2048, 1, 8, 1)),
        TuneEntry(1, 8, LinearTune(1, 2, 4096, 1, 8, 1)),
        TuneEntry(1, 13, LinearTune(1, 1, 512, 1, 1, 1)),
        TuneEntry(1, 20, LinearTune(1, 2, 512, 1, 2, 4), above=3584),
        TuneEntry(1, 20, LinearTune(1, 4, 1024, 1, 4, 4)),
        TuneEntry(1, 25, LinearTune(1, 4, 512, 1, 1, 4)),
        TuneEntry(1, 30, LinearTune(1, 4, 512, 1, 2, 4), above=4096),
        TuneEntry(1, 60, LinearTune(1, 1, 1024, 1, 2, 4), above=4096),
        TuneEntry(1, 70, LinearTune(1, 4, 512, 1, 1, 4)),
        TuneEntry(1, 100, LinearTune(1, 2, 2048, 1, 8, 4), above=4096),
        TuneEntry(1, 999, LinearTune(1, 4, 512, 1, 1, 4)),
        TuneEntry(2, 3, LinearTune(1, 2, 1024, 1, 4, 1)),
        TuneEntry(2, 8, LinearTune(1, 4, 1024, 1, 2, 4)),
        TuneEntry(2, 20, LinearTune(16, 64, 64, 4, 4, 8, swapped=True), above=2048),
        TuneEntry(2, 20, LinearTune(1, 4, 512, 1, 2, 4)),
        TuneEntry(4, 1.5, LinearTune(1, 4, 512, 1, 2, 1)),
        TuneEntry(4, 3, LinearTune(1, 4, 256, 1, 1, 4)),
        TuneEntry(16, 1.5, LinearTune(16, 16, 256, 1, 2, 5)),
        TuneEntry(16, 3, LinearTune(16, 16, 128, 4, 2, 6)),
        TuneEntry(16, 8, LinearTune(16, 64, 128, 8, 4, 4)),
        TuneEntry(16, 20, LinearTune(16, 64, 64, 4, 4, 8, swapped=True), above=2048),
        TuneEntry(16, 13, LinearTune(16, 64, 64, 4, 4, 6)),
        TuneEntry(16, 20, LinearTune(16, 32, 128, 4, 2, 6)),
        TuneEntry(16, 25, LinearTune(16, 64, 64, 4, 2, 6)),
        TuneEntry(16, 30, None, above=4096),
        TuneEntry(16, 60, LinearTune(16, 64, 128, 4, 4, 4, swapped=True), above=4096),
        TuneEntry(16, 70, LinearTune(16, 64, 64, 4, 2, 6)),
        TuneEntry(16, 100, LinearTune(16, 64, 128, 4, 4, 3, swapped=True), above=4096),
        TuneEntry(16, 999, LinearTune(16, 64, 64, 4, 2, 6)),
    ],
    "norm_gated": [
        TuneEntry(2, 12, LinearTune(1, 2, 1024, 1, 1, 1)),
        TuneEntry(1, 150, LinearTune(1, 2, 1024, 1, 4, 4), above=4096),
        TuneEntry(1, 999, LinearTune(1, 4, 512, 1, 2, 4), above=4096),
        TuneEntry(1, 60, LinearTune(1, 2, 4096, 1, 8, 1), above=2048),
        TuneEntry(2, 60, LinearTune(1, 1, 2048, 1, 1, 1)),
        TuneEntry(1, 999, LinearTune(1, 2, 4096, 1, 8, 1)),
        TuneEntry(16, 60, None),
        TuneEntry(16, 150, LinearTune(16, 32, 128, 1, 2, 5), above=4096),
        TuneEntry(16, 120, LinearTune(16, 32, 128, 1, 8, 3, swapped=True), above=3584),
        TuneEntry(16, 80, LinearTune(16, 32, 128, 1, 2, 3), above=2048),
        TuneEntry(16, 999, LinearTune(16, 32, 64, 1, 4, 4, swapped=True), above=2048),
        TuneEntry(16, 999, LinearTune(16, 64, 128, 1, 2, 3)),
    ],
}


def tune_of(product: Product, x: Tensor, weight: Tensor) -> LinearTune | None:
    """The table's constants for x [tokens, in] and its weight; None: cuBLAS is faster."""
    tokens, inputs = x.shape
    if tokens > MAX_TOKENS:
        return None
    for choice in TABLE[product]:
        small = tokens <= choice.tokens and weight.numel() <= choice.millions * 1e6
        if small and inputs > choice.above:
            tune = choice.tune
            return tune if tune is None or _is_supported(product, x, tune) else None
    return None


def _is_supported(product: Product, x: Tensor, tune: LinearTune) -> bool:
    """Whether the kernel supports such numbers with this tune.

    Tensor cores, which take rows of more than one token, do not multiply float32, and x *
    norm_weight may overflow float16.
    """
    if tune.rows == 1:
        return True
    if x.dtype is torch.float16:
        return product in ("linear", "linear_add")
    return x.dtype is not torch.float32
