"""Triton kernels, each beside its reference in plain torch."""

from torch import Tensor

# The kernels' tests run them without a GPU, under Triton's interpreter.
interpreting = False


def on_triton(x: Tensor) -> bool:
    """Whether Triton takes this tensor. One that is nowhere (torch's meta device) stands
    for a GPU's: what would be launched with it can be noted (specialization.py).
    """
    return x.is_cuda or x.is_meta or interpreting
