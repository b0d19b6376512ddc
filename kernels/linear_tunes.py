"""Constants of the kernel of fused_linear.py for each product, from measurements.

Best of 875 candidates at the shapes of Qwen2.5 0.5B, 1.5B and 7B on an H200, in CUDA
graphs over 220 MB of weights (2026-11-20). Compared with separate norm, cuBLAS and
activation, a step's products take at 1 token 0.58, 0.69 and 0.86 of the time, at 16
tokens 0.95, 0.98 and 0.96. The best isolated choice for 2 tokens and the 7B's products
made a whole step slower, 5.60 ms instead of 4.55 with that for 3 and 4 (2026-11-23), and
is left out.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Product = Literal["norm_linear", "linear_add", "norm_gated"]


class Tune(NamedTuple):
    """The tiling of a product into programs."""

    rows: int  # of a program. 1: a token each; else at least all tokens
    columns: int  # of a program
    # Of a pass along the summed dimension. A warp's share is at least 256 for one row,
    # else 64, or loads change their layout.
    depth: int
    splits: int  # programs that share a tile's depth
    warps: int
    stages: int
    swapped: bool = False  # weights are the first operand of the tensor cores


class TuneEntry(NamedTuple):
    """A row of the table: its upper limits, and the tune."""

    tokens: int
    millions: float  # of weights
    tune: Tune | None  # None: cuBLAS is faster


MOST_TOKENS: Final = 16  # of any row of the table
# The first row that fits is used; if none does, cuBLAS.
TABLE: Final[dict[Product, list[TuneEntry]]] = {
    # tokens, millions of weights; rows, columns, depth, splits, warps, stages
    "norm_linear": [
        TuneEntry(4, 2, Tune(1, 2, 512, 1, 2, 1)),
        TuneEntry(4, 8, Tune(1, 4, 256, 1, 1, 4)),
        TuneEntry(1, 99, Tune(1, 4, 256, 1, 1, 4)),
    ],
    "linear_add": [
        TuneEntry(2, 1.5, Tune(1, 2, 1024, 1, 4, 1)),
        TuneEntry(1, 3, Tune(1, 2, 2048, 1, 8, 1)),
        TuneEntry(1, 8, Tune(1, 2, 4096, 1, 8, 1)),
        TuneEntry(1, 13, Tune(1, 1, 512, 1, 1, 1)),
        TuneEntry(1, 20, Tune(1, 4, 1024, 1, 4, 4)),
        TuneEntry(1, 999, Tune(1, 4, 512, 1, 1, 4)),
        TuneEntry(2, 3, Tune(1, 2, 1024, 1, 4, 1)),
        TuneEntry(2, 8, Tune(1, 4, 1024, 1, 2, 4)),
        TuneEntry(2, 20, Tune(1, 4, 512, 1, 2, 4)),
        TuneEntry(4, 1.5, Tune(1, 4, 512, 1, 2, 1)),
        TuneEntry(4, 3, Tune(1, 4, 256, 1, 1, 4)),
        TuneEntry(16, 1.5, Tune(16, 16, 256, 1, 2, 5)),
        TuneEntry(16, 3, Tune(16, 16, 128, 4, 2, 6)),
        TuneEntry(16, 8, Tune(16, 64, 128, 8, 4, 4)),
        TuneEntry(16, 13, Tune(16, 64, 64, 4, 4, 6)),
        TuneEntry(16, 20, Tune(16, 32, 128, 4, 2, 6)),
        TuneEntry(16, 999, Tune(16, 64, 64, 4, 2, 6)),
    ],
    "norm_gated": [
        TuneEntry(2, 12, Tune(1, 2, 1024, 1, 1, 1)),
        TuneEntry(2, 60, Tune(1, 1, 2048, 1, 1, 1)),
        TuneEntry(1, 999, Tune(1, 2, 4096, 1, 8, 1)),
        TuneEntry(16, 60, None),
        TuneEntry(16, 999, Tune(16, 64, 128, 1, 2, 3)),
    ],
}


def tune_of(product: Product, x: Tensor, weight: Tensor) -> Tune | None:
    """The table's constants for x [tokens, in] and its weight; None: cuBLAS is faster."""
    tokens = x.shape[0]
    if tokens > MOST_TOKENS:
        return None
    for choice in TABLE[product]:
        if tokens <= choice.tokens and weight.numel() <= choice.millions * 1e6:
            tune = choice.tune
            return tune if tune is None or _holds(product, x, tune) else None
    return None


def _holds(product: Product, x: Tensor, tune: Tune) -> bool:
    """Whether the kernel supports such numbers with this tune.

    Tensor cores, which take rows of more than one token, do not multiply float32, and x *
    norm_weight may overflow float16.
    """
    if tune.rows == 1:
        return True
    if x.dtype is torch.float16:
        return product == "linear_add"
    return x.dtype is not torch.float32
