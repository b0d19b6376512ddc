"""Numbers of 8 bits in plain torch: FP8 (e4m3) and INT8, of weights, activations and KV
caches.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
INT8: Final = torch.int8
LARGEST: Final[Mapping[torch.dtype, float]] = {FP8: 448.0, INT8: 127.0}


def divide(x: Tensor, number: float) -> Tensor:
    """Returns x / number, the same on every device."""
    # By a tensor: by a number, PyTorch on CUDA multiplies with its rounded reciprocal.
    return x / x.new_full((), number)


def to_8_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the nearest numbers of FP8 or INT8, halfway the even one; those beyond the
    largest become the largest. NaN stays NaN in FP8 and is 0 in INT8.
    """
    largest = LARGEST[dtype]
    if dtype is INT8:
        return x.nan_to_num(0.0).round_().clamp_(-largest, largest).to(dtype)
    return x.clamp(-largest, largest).to(dtype)
