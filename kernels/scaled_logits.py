"""Logits times a factor (Granite, Cohere), and capped (Gemma 2): cap * tanh(x / cap).

In place, by one launch after the output head; a model with neither has no launch. Bound
by memory: 256 rows of 256k logits in 2 bytes are read and written in 62 us at 4.2 TB/s.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.attention_kernels import tanh
from minfer.kernels.pdl import early, follow

CHUNK: Final = 4096  # logits of a program
WARPS: Final = 4


@triton.jit
def _scale_logits(logits, stride, size, scale, cap, chunk: tl.constexpr):
    """Grid [chunks, rows]; cap: of logits that are divided by it within `scale`, or
    None.
    """
    follow()
    ids = tl.program_id(0) * chunk + tl.arange(0, chunk)
    pointers = logits + tl.program_id(1).to(tl.int64) * stride + ids
    x = tl.load(pointers, mask=ids < size, other=0.0).to(tl.float32) * scale
    if cap is not None:
        x = tanh(x) * cap
    tl.store(pointers, x, mask=ids < size)


def scale_logits(logits: Tensor, scale: float, cap: float | None = None) -> None:
    """Multiply logits [rows, size], rows contiguous, by `scale`, then bring them between
    -cap and cap; in place, computed in float32.
    """
    if not on_triton(logits):
        plain.scale_logits(logits, scale, cap)
        return
    rows, size = logits.shape
    if not rows:
        return
    _scale_logits[triton.cdiv(size, CHUNK), rows](
        logits=logits,
        stride=logits.stride(0),
        size=size,
        scale=scale if cap is None else scale / cap,
        cap=cap,
        chunk=CHUNK,
        num_warps=WARPS,
        launch_pdl=early(logits),
    )
