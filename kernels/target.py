"""Which GPU kernels are launched on, or compiled for where it is not.

Constants, and whether kernels are launched early, depend on a GPU's compute capability.
That is the device's own; for tensors that are on no GPU, the one that somebody said.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Final

import torch

Capability = tuple[int, int]  # as torch has it: (9, 0) is sm_90
NONE: Final[Capability] = (0, 0)
HOPPER: Final[Capability] = (9, 0)
_aimed: ContextVar[Capability] = ContextVar("aimed", default=NONE)


def capability(device: torch.device) -> Capability:
    """The compute capability of a GPU; of any other device, what is aimed at."""
    return _found(device) if device.type == "cuda" else _aimed.get()


@cache
def _found(device: torch.device) -> Capability:
    return torch.cuda.get_device_capability(device)


def aim_here() -> Capability | None:
    """What this thread aims at, if it does."""
    wanted = _aimed.get()
    return None if wanted == NONE else wanted


def aim(wanted: Capability) -> None:
    """Aim at a GPU as long as this thread lives."""
    _aimed.set(wanted)


@contextmanager
def aimed_at(wanted: Capability) -> Iterator[None]:
    """In here, tensors that are on no GPU stand for those of one."""
    token = _aimed.set(wanted)
    try:
        yield
    finally:
        _aimed.reset(token)
