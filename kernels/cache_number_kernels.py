"""Rounding to the 8 bits of a KV cache in Triton kernels, as in cache_numbers.py."""

import triton
import triton.language as tl

# Added to a float32 below 2**22 and subtracted again, it rounds to whole numbers, halfway
# to the even one.
ROUND = tl.constexpr(1.5 * 2**23)
SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def saturated(x, like):
    """float32 numbers for a store to pointers `like`: of FP8, none is beyond 448."""
    if like.dtype.element_ty == tl.float8e4nv:
        x = tl.where(x > 448.0, 448.0, x)  # NaN stays
        x = tl.where(x < -448.0, -448.0, x)
    return x.to(like.dtype.element_ty)


@triton.jit
def step_of(top):
    """The scale of INT8 numbers whose largest magnitude is `top`."""
    return tl.maximum(
        tl.div_rn(top, tl.zeros_like(top) + 127.0),
        tl.zeros_like(top) + SMALLEST,
        propagate_nan=tl.PropagateNan.ALL,
    )


@triton.jit
def in_steps(x, step):
    """float32 numbers in steps of this size, as INT8; of NaN, 0."""
    steps = tl.div_rn(x, step + tl.zeros_like(x))
    steps = tl.where(steps == steps, steps, 0.0) + ROUND - ROUND
    steps = tl.where(steps > 127.0, 127.0, steps)
    return tl.where(steps < -127.0, -127.0, steps).to(tl.int8)
