"""Conversions to 8 bits within Triton kernels, as those of eight_bits.py."""

import triton
import triton.language as tl

_ROUND = tl.constexpr(1.5 * 2**23)
_SMALLEST = tl.constexpr(1.1754943508222875e-38)  # as in cache_numbers.py


@triton.jit
def nearest(x):
    """float32 numbers below 2**22 rounded to whole numbers, halfway to the even one."""
    return x + _ROUND - _ROUND


@triton.jit
def saturated(x, like):
    """float32 numbers for a store to pointers `like`: of FP8, none is beyond 448."""
    if like.dtype.element_ty == tl.float8e4nv:
        x = tl.where(x > 448.0, 448.0, x)  # NaN stays
        x = tl.where(x < -448.0, -448.0, x)
    return x.to(like.dtype.element_ty)


@triton.jit
def int8_scale(largest):
    """The scale of INT8 numbers whose largest magnitude is `largest`."""
    return tl.maximum(
        tl.div_rn(largest, tl.zeros_like(largest) + 127.0),
        tl.zeros_like(largest) + _SMALLEST,
        propagate_nan=tl.PropagateNan.ALL,
    )


@triton.jit
def quantize_int8(x, scale):
    """float32 numbers as INT8 of this scale; NaN is 0."""
    scaled = tl.div_rn(x, scale + tl.zeros_like(x))
    scaled = nearest(tl.where(scaled == scaled, scaled, 0.0))
    scaled = tl.where(scaled > 127.0, 127.0, scaled)
    return tl.where(scaled < -127.0, -127.0, scaled).to(tl.int8)
