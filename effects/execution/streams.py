"""A GPU's stream and what belongs to it, and what stands for them on the CPU.

On a GPU, launching returns at once and the work is done in the order of its stream; host
memory is pinned, so that copies need not wait either. On the CPU nothing of this exists:
there is no stream, work is done when it is asked for.

While a graph is captured on one stream, nobody in the process may wait for all that the
device does: CUDA refuses it, and spoils the capture. Engines of one process capture at
moments of their own, so whoever does either holds `UNDISTURBED`.
"""

import threading
from typing import Final

import torch
from torch import Tensor

# For a thread that has it, it is free: a failed capture waits for the device.
UNDISTURBED: Final = threading.RLock()


def is_gpu(device: torch.device) -> bool:
    """Whether work on this device goes on while the host does something else."""
    return device.type == "cuda"


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own; None on the CPU."""
    # Torch's.
    return torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """Something that a stream can pass, and the host can wait for; None on the CPU."""
    # Torch's.
    return torch.cuda.Event() if is_gpu(device) else None  # type: ignore[no-untyped-call]


def host_words(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Host memory for int32, from and to which the device copies without waiting."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=is_gpu(device))


def wait(device: torch.device) -> None:
    """Until all that was launched is done."""
    if is_gpu(device):
        with UNDISTURBED:
            torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Let others have the memory that torch keeps for itself."""
    if is_gpu(device):
        with UNDISTURBED:  # it waits, too
            torch.cuda.empty_cache()
