"""Integers of 4 bits, eight in an int32, as AWQ, GPTQ and compressed-tensors write them,
and as minfer keeps them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

PER_INT32: Final = 8  # numbers of an int32
IN_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)
TYPES: Final = ("I32",)


def unpacked(stored: "Tensor", dim: int, order: Sequence[int] = IN_ORDER) -> "Tensor":
    """Returns uint8 numbers from 0 to 15, eight times as many along `dim`. `order` says
    of each four bits, from the lowest on, which of eight numbers they are.
    """
    import torch

    shifts = torch.tensor(order, device=stored.device).argsort() * 4
    numbers = stored.movedim(dim, -1).unsqueeze(-1) >> shifts & 15
    return numbers.to(torch.uint8).flatten(-2).movedim(-1, dim)


def in_bytes(numbers: "Tensor") -> "Tensor":
    """Returns numbers [outputs, inputs] two in a byte, as `Scheme.numbers` says."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4
