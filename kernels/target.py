"""The compute capability of the GPU that kernels are launched on.

Constants, and whether kernels are launched early, depend on it.
"""

from functools import cache
from typing import Final

import torch

Capability = tuple[int, int]  # as in torch: (9, 0) is sm_90
NONE: Final[Capability] = (0, 0)
HOPPER: Final[Capability] = (9, 0)
default_capability: Capability = (
    NONE  # for devices that are not a GPU; tests set it to that of a GPU
)


def capability(device: torch.device) -> Capability:
    """The compute capability of a GPU."""
    return _cuda_capability(device) if device.type == "cuda" else default_capability


@cache
def _cuda_capability(device: torch.device) -> Capability:
    return torch.cuda.get_device_capability(device)
