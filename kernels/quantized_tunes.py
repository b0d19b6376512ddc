"""Constants of products with quantized matrices: start values from arithmetic, until
they are measured.

25 KB of weights have to be in flight on each of 132 processors (fused_linear.py). A
program of 64 columns and depth 128 has 8 KB in each stage at 8 bits, 4 KB at 4, and
shares a processor with one or two others: tiles of columns times `splits` are about 300.
An output's part of a pass is at least 64 bytes. With 128 lines of weights, what rows of x
cost besides is spread over more weights.
"""

from typing import Final

import torch
from torch import Tensor

from minfer.kernels.leaves import Linear, Scheme
from minfer.kernels.linear_tunes import Tune, TuneEntry

# The most tokens for which norms are computed in each program of a product.
FUSED_NORM: Final = 16
# By the bits of numbers, and whether gates follow. tokens: the most of the kernel; with
# more, libraries multiply. The first row that fits is used; if none does, libraries
# multiply as well.
TABLE: Final[dict[tuple[int, bool], list[TuneEntry]]] = {
    # tokens, millions of weights; rows, columns, depth, splits, warps, stages
    (8, False): [
        TuneEntry(1, 20, Tune(1, 2, 512, 1, 1, 4)),
        TuneEntry(1, 9999, Tune(1, 4, 512, 1, 1, 4)),
        TuneEntry(16, 9999, Tune(16, 64, 128, 4, 4, 4)),
    ],
    (8, True): [
        TuneEntry(1, 9999, Tune(1, 2, 512, 1, 1, 4)),
        TuneEntry(16, 9999, Tune(16, 64, 128, 1, 4, 4)),
    ],
    (4, False): [
        TuneEntry(16, 9999, Tune(16, 64, 128, 4, 4, 5)),
        TuneEntry(64, 9999, Tune(32, 64, 128, 4, 4, 4)),
    ],
    (4, True): [
        TuneEntry(16, 9999, Tune(16, 64, 128, 1, 4, 5)),
        TuneEntry(64, 9999, Tune(32, 64, 128, 1, 4, 4)),
    ],
}
# Of 8 bits in blocks there is no library's product: the kernel takes more tokens.
BLOCKS: Final = TuneEntry(64, 9999, Tune(32, 64, 128, 2, 4, 4))


def tune_of(x: Tensor, by: Linear, *, gated: bool = False) -> Tune | None:
    """The constants for x [tokens, inputs] and a leaf; None: a library multiplies."""
    if x.dtype is torch.float32:  # which tensor cores do not multiply
        return None
    for row in _rows(by.scheme, gated=gated):
        if len(x) <= row.tokens and by.weight.numel() * by.scheme.numbers <= (
            row.millions * 1e6
        ):
            return row.tune
    return None


def _rows(scheme: Scheme, *, gated: bool) -> list[TuneEntry]:
    rows = TABLE[scheme.bits, gated]
    return [*rows, BLOCKS] if scheme.activations == "groups" else rows
