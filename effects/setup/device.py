"""Where a model runs: looked for once, before anything is loaded.

GPUs are looked for on Linux and in Windows' WSL 2, as Triton runs there alone.
"""

import glob
import os
import sys
from typing import Final

from attrs import frozen

from minfer.checks import ConfigError

DEVICES: Final = ("auto", "cpu", "cuda")
# Compute capability: bfloat16 on the tensor cores, asynchronous copies.
OLDEST: Final = (8, 0)


class DeviceError(ConfigError):
    """The GPU that was asked for cannot be used."""


@frozen
class Device:
    """A place for weights and KV; `total` and `free` are a GPU's bytes, 0 for the CPU."""

    kind: str = "cpu"  # as torch calls it
    name: str = "CPU"
    total: int = 0
    free: int = 0


def find_device(wanted: str) -> Device:
    """The device that "cpu", "cuda" or "auto" means here; torch is imported if there is a
    GPU.

    "auto" is the GPU if it can be used, else the CPU, which is said on standard error
    where a GPU is there in vain. Raises DeviceError if "cuda" was asked for and cannot be
    had.
    """
    # No driver, no GPU: importing torch to find that out takes seconds.
    if wanted == "cpu" or (wanted == "auto" and not _driver()):
        return Device()
    import torch

    why = _unusable()
    if not why:
        index = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        return Device("cuda", torch.cuda.get_device_name(index), total, free)
    if wanted == "cuda":
        raise DeviceError(
            f"no GPU can be used: {why}, or run on the CPU with --device cpu"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        print(
            f"minfer: running on the CPU, as the GPU cannot be used: {why}",
            file=sys.stderr,
        )
    return Device()


def _driver() -> bool:
    """Whether a GPU's driver shows itself: Linux' own, or Windows' within WSL."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))


def _unusable() -> str:
    """Why torch cannot use a GPU, and what to do; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; install a build with it"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        found = torch.cuda.get_device_capability()
        # A GPU may be full, or another process's alone.
        torch.cuda.mem_get_info(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        line = str(error).strip().partition("\n")[0]
        return (
            f"{line} (torch {torch.__version__} is for CUDA {torch.version.cuda}); "
            "check with nvidia-smi that there is a GPU and that its driver is as new"
        )
    if found < OLDEST:
        return (
            f"its compute capability is {found[0]}.{found[1]}, and minfer's kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} (Ampere) or later; use a newer GPU"
        )
    return ""
