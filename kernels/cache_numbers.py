"""The arithmetic of a KV cache in 8 bits, in plain torch: what a write stores and a read
gives.

Theory. What a cache holds of a token is a function of that token alone, so that blocks
can be shared, recomputed and compared; scales that follow a running maximum would differ
with what came before. Two formats:

    FP8   e4m3, without a scale: numbers up to 448 with 4 significant bits, those beyond
          it are stored as 448. Keys and values of models are far below that.
    INT8  127 steps to either side, of which the largest magnitude of a token's head is
          the last; the size of a step is a float32 for each token and head.

Numbers are rounded to the model's dtype first, as they would be stored in it, then to 8
bits; halfway to the even one. All numbers of both formats are numbers of bfloat16 and
float16, too, so products with them need no further rounding.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
INT8: Final = torch.int8
FP8_MOST: Final = 448.0
INT8_MOST: Final = 127.0
# Where sign, exponent and fraction of FP8 are in float32: bits 31 and 20 to 26.
FLOAT32_BITS: Final = (1 << 27) - (1 << 20) - (1 << 31)
# Of a head of zeros, which any scale restores; the smallest float32 with all its bits.
SMALLEST: Final = torch.finfo(torch.float32).tiny


class CacheScales(NamedTuple):
    """The scales of one layer's keys and values: each [blocks, block_size, kv_heads]
    float32.
    """

    keys: Tensor
    values: Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns x [..., dim] as a cache of `dtype` stores it: numbers [..., dim], and for
    INT8 scales [...] float32.
    """
    if dtype is FP8:
        return x.float().clamp(-FP8_MOST, FP8_MOST).to(FP8), None
    if dtype is not INT8:
        return x.to(dtype), None
    wide = x.float()
    scales = (wide.abs().amax(-1) / INT8_MOST).clamp_min(SMALLEST)
    steps = (wide / scales[..., None]).nan_to_num(0.0)  # a scale that is NaN says it
    return steps.round_().clamp_(-INT8_MOST, INT8_MOST).to(INT8), scales


def restored(numbers: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns what `rounded` has stored, in a dtype."""
    if scales is None:
        on_cpu = numbers.dtype is FP8 and numbers.device.type == "cpu"
        return _widened(numbers).to(dtype) if on_cpu else numbers.to(dtype)
    return (numbers.float() * scales[..., None]).to(dtype)


def _widened(numbers: Tensor) -> Tensor:
    """Returns FP8 numbers in float32, in a third of the time of torch's conversion on a
    CPU: sign, exponent and fraction are moved to their places in float32, whose exponent
    has a larger bias.
    """
    wide = numbers.view(INT8).to(torch.int32)  # all upper bits are the sign
    bits = wide.bitwise_left_shift_(20).bitwise_and_(FLOAT32_BITS)
    # Exponent and fraction of ones are NaN: one more carries into bit 27, which becomes
    # an exponent of ones.
    nan = bits.add(1 << 20).bitwise_and_(1 << 27).bitwise_right_shift_(4).mul_(255)
    return bits.bitwise_or_(nan).view(torch.float32).mul_(2.0 ** (127 - 7))


def write(cache: Tensor, scales: Tensor | None, slots: Tensor, new: Tensor) -> None:
    """Store new [tokens, ...] in slots [tokens], not negative, of a cache [blocks,
    block_size, ...]; with scales [blocks, block_size, ...] if it is INT8.
    """
    numbers, steps = rounded(new, cache.dtype)
    at, size = slots.long(), cache.shape[1]
    places = at // size, at % size
    as_bytes(cache)[places] = as_bytes(numbers)
    if scales is not None and steps is not None:
        scales[places] = steps


def as_bytes(numbers: Tensor) -> Tensor:
    """Returns a view that torch copies, gathers and scatters: it does not all of FP8."""
    return numbers.view(torch.uint8) if numbers.itemsize == 1 else numbers
