"""Finds the device of a model, once, before anything is loaded.

GPUs are searched for on Linux and in Windows' WSL 2, as Triton runs only there.
"""

import glob
import os
import sys
from typing import Final

from attrs import frozen

from minfer.values.checks import ConfigError

DEVICES: Final = ("auto", "cpu", "cuda")
# Compute capability: bfloat16 on the tensor cores, asynchronous copies.
MIN_CAPABILITY: Final = (8, 0)


class DeviceError(ConfigError):
    """The requested GPU cannot be used."""


@frozen
class DeviceInfo:
    """A device for weights and KV; `total` and `free` are a GPU's bytes, 0 for the
    CPU.
    """

    kind: str = "cpu"  # torch's name of it
    name: str = "CPU"
    total: int = 0
    free: int = 0
    capability: tuple[int, int] | None = (
        None  # None: the CPU, or a GPU that need not exist
    )


def find_device(requested: str, ranks: int = 1) -> DeviceInfo:
    """Returns the device that "cpu", "cuda" or "auto" means here, for an engine of
    `ranks` ranks: of several GPUs, `free` is the least free memory. torch is imported if
    there is a GPU.

    "auto" is the GPU if it can be used, else the CPU; if there is an unusable GPU, that
    is reported on standard error. Raises DeviceError if "cuda" is requested and cannot be
    used.
    """
    # No driver, no GPU: importing torch to find that takes seconds.
    if requested == "cpu" or (requested == "auto" and not _has_driver()):
        return DeviceInfo()
    import torch

    reason = _unusable_reason()
    if not reason:
        index = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        if ranks > 1:
            free = _min_free_memory(ranks)
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability()
        return DeviceInfo("cuda", name, total, free, capability)
    if requested == "cuda":
        raise DeviceError(
            f"no GPU can be used: {reason}, or run on the CPU with --device cpu"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        print(
            f"minfer: running on the CPU, as the GPU cannot be used: {reason}",
            file=sys.stderr,
        )
    return DeviceInfo()


def _min_free_memory(ranks: int) -> int:
    """Returns the least free memory of the first GPUs, in bytes. Raises DeviceError if
    there are fewer than ranks.
    """
    import torch

    if (num_gpus := torch.cuda.device_count()) < ranks:
        raise DeviceError(
            f"{ranks} ranks need a GPU each (tensor_parallel_size, "
            f"pipeline_parallel_size), and {num_gpus} can be seen; use fewer, or make "
            f"more visible (CUDA_VISIBLE_DEVICES)"
        )
    return min(torch.cuda.mem_get_info(index)[0] for index in range(ranks))


def _has_driver() -> bool:
    """Returns whether a GPU's driver is present: Linux' own, or Windows' within WSL."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))


def _unusable_reason() -> str:
    """Returns why torch cannot use a GPU, and the remedy; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; install a build with it"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        capability = torch.cuda.get_device_capability()
        # A GPU may be full, or reserved by another process.
        torch.cuda.mem_get_info(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        line = str(error).strip().partition("\n")[0]
        return (
            f"{line} (torch {torch.__version__} is for CUDA {torch.version.cuda}); "
            "check with nvidia-smi that there is a GPU and that its driver is as new"
        )
    if capability < MIN_CAPABILITY:
        return (
            f"its compute capability is {capability[0]}.{capability[1]}, and minfer's "
            f"kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) "
            f"or later; use a newer GPU"
        )
    return ""
