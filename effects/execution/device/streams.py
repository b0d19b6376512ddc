"""A GPU's streams, events and pinned memory, and their substitutes on the CPU.

On a GPU, a launch returns at once and the work is done in the order of its stream; host
memory is pinned, so that copies do not wait either. On the CPU there is no stream: work
is done when it is called.

While a graph is captured on one stream, no thread of the process may wait for the whole
device: CUDA refuses it, and the capture fails. Engines of one process capture
independently, so a thread that does either holds `CAPTURE_LOCK`.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

# Reentrant: a thread that captures waits for the device if the capture fails.
CAPTURE_LOCK: Final = threading.RLock()


def is_gpu(device: torch.device) -> bool:
    """Returns whether this device works asynchronously to the host."""
    return device.type == "cuda"


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a new stream; None on the CPU."""
    # Torch's.
    return torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]


class StreamContext:
    """Makes a stream of the current device the current one in a `with` block."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.before = torch.cuda.current_stream(stream.device_index)

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Returns a context in which launches go to a stream; it changes nothing without one.
    Like `torch.cuda.stream`, which first looks up the devices each time: that takes a
    hundredth of some steps.
    """
    if stream is None:
        return nullcontext()
    if torch.cuda.current_device() != stream.device_index:
        return torch.cuda.stream(stream)
    return StreamContext(stream)


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event that a stream records and the host can wait for; None on the
    CPU.
    """
    # Torch's.
    return torch.cuda.Event() if is_gpu(device) else None  # type: ignore[no-untyped-call]


def host_words(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns host memory for int32, from and to which the device copies without
    waiting.
    """
    return torch.empty(shape, dtype=torch.int32, pin_memory=is_gpu(device))


def wait(device: torch.device) -> None:
    """Wait until all launched work is done."""
    if is_gpu(device):
        with CAPTURE_LOCK:
            torch.cuda.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Release the memory that torch caches."""
    if is_gpu(device):
        with CAPTURE_LOCK:  # it waits, too
            torch.cuda.empty_cache()
