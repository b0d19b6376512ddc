"""Triton kernels, each beside its reference in plain torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The kernels' tests run them without a GPU, under Triton's interpreter.
interpreting = False


def on_triton(x: "Tensor") -> bool:
    """Whether Triton takes this tensor."""
    return x.is_cuda or interpreting
