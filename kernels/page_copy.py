"""Copies of whole pages of a cache, in one launch.

Bound by memory: a state of Qwen3-Next, 50 pages of 1.5 MB, is read and written in 36 us
at 4.2 TB/s.
"""

import triton
import triton.language as tl
from torch import Tensor, int64

from minfer.kernels import on_triton

BLOCK = 2048  # words of a program: 16 of each thread


@triton.jit
def _copy(data, pairs, words, block: tl.constexpr):
    """Grid [pairs, words / block]."""
    pair = pairs + 2 * tl.program_id(0)
    source = tl.load(pair) * words
    target = tl.load(pair + 1) * words
    lane = tl.program_id(1) * block + tl.arange(0, block)
    numbers = tl.load(data + source + lane, lane < words, 0)
    tl.store(data + target + lane, numbers, lane < words)


def copy_pages(data: Tensor, pairs: Tensor) -> None:
    """data[target] = data[source] for each (source, target) of `pairs` [n, 2] int64.

    `data` [pages, bytes], contiguous, of whole words of 8 bytes. No target is another's
    target, or a source.
    """
    words = data.view(int64)
    if not on_triton(data):
        sources, targets = pairs.unbind(1)
        words.index_copy_(0, targets, words.index_select(0, sources))
        return
    _copy[len(pairs), triton.cdiv(words.shape[1], BLOCK)](
        data=words,
        pairs=pairs,
        words=words.shape[1],
        block=BLOCK,
    )
