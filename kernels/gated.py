"""activation(gate) * up of a product in one kernel: quack's, with asynchronous copies and
products.

Theory. The product itself, twice as wide as the result, is not written to memory, and the
kernel is as fast as cuBLAS's. But its tiles are large: two processors make 256 rows of
192 columns together, and the number of waves is rounded up. If those are filled to 76 %
or more, it took 0.65 to 0.90 of the time of cuBLAS and gated_mul, below 75 % 0.98 to 1.68
(192 to 8,192 tokens at the shapes of Qwen2.5 0.5B, 1.5B and 7B, H200, 2026-11-22); with
gelu at Gemma 2 9B's, 0.83 to 1.01 from 76 % on, 1.02 to 1.20 below (256 to 16,384 tokens,
H200, 2026-11-30). For products added to the residual cuBLAS is faster. Its sums are not
rounded before the activation: with gelu its results are off by 0.0017 (relative, as the
rounding of bfloat16), those of cuBLAS and gated_mul by 0.0032, although its tanh has 11
bits.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from torch import Tensor

from minfer.kernels.leaves import Activation, Linear
from minfer.kernels.packages import QUACK

# rows and columns of a tile
ROWS = 256
COLUMNS = 192
PROCESSOR_PAIRS = 66  # of processors, on an H100 or H200
# Share of the tiles' places that are used, from which on it is faster.
MIN_FILLED_SHARE = 0.76
# The activations that quack has, and its names of them.
QUACK_ACTIVATIONS: Final[Mapping[Activation, str]] = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
}


def is_gated_faster(tokens: int, inter: int) -> bool:
    """Whether `gated` is faster than cuBLAS and gated_mul."""
    tiles = -(-tokens // ROWS) * -(-2 * inter // COLUMNS)
    rounds = -(-tiles // PROCESSOR_PAIRS)
    return (
        tokens * 2 * inter >= MIN_FILLED_SHARE * rounds * PROCESSOR_PAIRS * ROWS * COLUMNS
    )


def gated(x: Tensor, gate_up: Linear, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up [tokens, inter] of [gate, up] = x @ gate_up.T: [tokens,
    hidden], [2 * inter, hidden] without bias, one dtype.

    activation: one of `QUACK_ACTIVATIONS`. Call it before a CUDA graph captures it.
    """
    weight = gate_up.weight
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    import_module(QUACK).gemm_act(
        x,
        weight.t(),
        activation=QUACK_ACTIVATIONS[activation],
        postact_out=out,
        store_preact=False,
        tuned=False,
        concat_layout=("B",),
    )
    return out
