"""A GPU's stream and what belongs to it, and what stands for them on the CPU.

On a GPU, launching returns at once and the work is done in the order of its stream; host
memory is pinned, so that copies need not wait either. On the CPU nothing of this exists:
there is no stream, work is done when it is asked for.

While a graph is captured on one stream, nobody in the process may wait for all that the
device does: CUDA refuses it, and spoils the capture. Engines of one process capture at
moments of their own, so whoever does either holds `UNDISTURBED`.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
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


class On:
    """What is launched meanwhile goes to a stream of the current device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.before = torch.cuda.current_stream(stream.device_index)

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """What is launched meanwhile goes to a stream; nothing changes without one. As
    `torch.cuda.stream`, which first finds out each time which devices there are: there
    are steps of which that takes a hundredth.
    """
    if stream is None:
        return nullcontext()
    if torch.cuda.current_device() != stream.device_index:
        return torch.cuda.stream(stream)
    return On(stream)


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
