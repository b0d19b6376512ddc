"""Gates of what attention returns (Laguna): in place and in one launch.

A gate is of a head, or of each of its dimensions. Bound by memory: 4,096 tokens of 48
heads of 128 in 2 bytes are 100 MB, 24 us at 4.2 TB/s.
"""

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.leaves import GateActivation
from minfer.kernels.pdl import early, follow

TILE = 1024  # elements of a program
WARPS = 4
LINEAR_FROM = tl.constexpr(plain.SOFTPLUS_LINEAR_FROM)


@triton.jit
def activated(x, activation: tl.constexpr):
    """The activation of gates in float32."""
    if activation == "sigmoid":
        result = 1 / (1 + tl.exp(-x))
    else:
        # log(1 + power) without the loss of small powers: 1 + power is rounded, and the
        # logarithm is scaled by what rounding changed.
        is_linear = x > LINEAR_FROM
        power = tl.exp(tl.where(is_linear, 0.0, x))
        total = 1 + power
        is_tiny = total == 1
        scale = power / tl.where(is_tiny, 1.0, total - 1)
        result = tl.where(is_tiny, power, tl.log(total) * scale)
        result = tl.where(is_linear, x, result)
    return result


@triton.jit
def _gate_heads(
    x,
    gates,
    x_stride,
    gate_stride,
    size,
    width: tl.constexpr,
    activation: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [tokens, tiles of a row]. A gate is of `width` elements."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = lane < size
    gate = tl.load(gates + row * gate_stride + lane // width, mask=mask, other=0.0)
    pointers = x + row * x_stride + lane
    value = tl.load(pointers, mask=mask, other=0.0)
    factor = activated(gate.to(tl.float32), activation).to(value.dtype)
    tl.store(pointers, value * factor, mask=mask)


def gate_heads(x: Tensor, gates: Tensor, activation: GateActivation) -> None:
    """Multiply `x` [tokens, heads * dim] with the activation of `gates` in place:
    [tokens, heads], of a head each, or [tokens, heads * dim].

    One dtype; rows contiguous. Activations are computed in float32, and rounded.
    """
    if not on_triton(x) or not len(x):
        plain.gate_heads(x, gates, activation)
        return
    tokens, size = x.shape
    _gate_heads[tokens, triton.cdiv(size, TILE)](
        x=x,
        gates=gates,
        x_stride=x.stride(0),
        gate_stride=gates.stride(0),
        size=size,
        width=size // gates.shape[1],
        activation=activation,
        tile=TILE,
        num_warps=WARPS,
        launch_pdl=early(x),
    )
