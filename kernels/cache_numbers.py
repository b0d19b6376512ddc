"""A KV cache in 8 bits, in plain torch: how a write quantizes and a read dequantizes.

Theory. What a cache holds of a token is a function of that token alone, so that blocks
can be shared, recomputed and compared; scales that follow a running maximum would differ
with what came before. Two formats:

    FP8   e4m3, without a scale: numbers up to 448 with 4 significant bits, those beyond
          it are stored as 448. Keys and values of models are far below that.
    INT8  a float32 scale per token and head (vLLM's int8_per_token_head), which maps the
          head's largest magnitude to 127.

Numbers are rounded to the model's dtype first, as they would be stored in it, then to 8
bits; halfway to the even one. bfloat16 and float16 represent all numbers of both formats,
so products with them need no further rounding.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from minfer.kernels.eight_bits import FP8, INT8, LARGEST, divide, to_8_bits

__all__ = ["FP8", "INT8", "CacheScales", "as_bytes", "dequantize", "quantize", "write"]

# The scale of a head of zeros, for which any would do: the smallest normal float32.
SMALLEST: Final = torch.finfo(torch.float32).tiny


class CacheScales(NamedTuple):
    """The scales of one layer's keys and values: each [blocks, block_size, kv_heads]
    float32.
    """

    keys: Tensor
    values: Tensor


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns x [..., dim] as a cache of `dtype` stores it: numbers [..., dim], and for
    INT8 scales [...] float32. The scale of a head with a NaN is NaN.
    """
    if dtype is FP8:
        return to_8_bits(x.float(), FP8), None
    if dtype is not INT8:
        return x.to(dtype), None
    wide = x.float()
    scales = divide(wide.abs().amax(-1), LARGEST[INT8]).clamp_min(SMALLEST)
    return to_8_bits(wide / scales[..., None], INT8), scales


def dequantize(numbers: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns stored numbers [..., dim] times their scales [...], in a dtype."""
    if scales is None:
        on_cpu = numbers.dtype is FP8 and numbers.device.type == "cpu"
        return _fp8_to_float32(numbers).to(dtype) if on_cpu else numbers.to(dtype)
    return (numbers.float() * scales[..., None]).to(dtype)


def _fp8_to_float32(numbers: Tensor) -> Tensor:
    """Returns FP8 numbers in float32, in half of the time of torch's conversion of a few
    blocks on a CPU: sign, exponent and fraction are moved to their places in float16,
    whose exponent has a larger bias.
    """
    # By float16: subnormal numbers of float32 would be 0 where a process flushes them,
    # which does not affect conversions from float16.
    wide = numbers.view(INT8).to(torch.int16)  # all upper bits are the sign
    bits = wide.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    # Exponent and fraction of ones are NaN: one more carries into bit 14, which makes an
    # exponent of ones.
    nan = bits.add(1 << 7).bitwise_and_(1 << 14)
    return bits.bitwise_or_(nan).view(torch.float16).float().mul_(2.0 ** (15 - 7))


def write(
    cache: Tensor, scales: Tensor | None, slots: Tensor, new: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Store new [tokens, ...] in slots [tokens], not negative, of a cache [blocks,
    block_size, ...]; with scales [blocks, block_size, ...] if it is INT8. Returns what is
    stored of `new`, as `quantize`.
    """
    numbers, new_scales = quantize(new, cache.dtype)
    slot_index, size = slots.long(), cache.shape[1]
    places = slot_index // size, slot_index % size
    as_bytes(cache)[places] = as_bytes(numbers)
    if scales is not None and new_scales is not None:
        scales[places] = new_scales
    return numbers, new_scales


def as_bytes(numbers: Tensor) -> Tensor:
    """Returns a view as bytes, if numbers have 8 bits: torch does not copy, gather and
    scatter all tensors of FP8.
    """
    return numbers.view(torch.uint8) if numbers.itemsize == 1 else numbers
