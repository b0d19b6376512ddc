"""Other packages' kernels, which need not be installed: flash-attn-4's, and
quack-kernels'.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

FLASH: Final = "flash_attn.cute.interface"
QUACK: Final = "quack.gemm_interface"
NAMES: Final = {FLASH: "flash-attn-4", QUACK: "quack-kernels"}


def missing(package: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why a package cannot serve this dtype on this device; empty if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"{NAMES[package]} is used on Hopper GPUs only"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{NAMES[package]} takes bfloat16 and float16, not {dtype}"
    top, part, *_ = package.split(".")
    places = found.submodule_search_locations or () if (found := find_spec(top)) else ()
    if not any(
        Path(place, part + end).exists() for place in places for end in ("", ".py")
    ):
        return f"{NAMES[package]} is not installed"
    return ""


@cache
def load(package: str) -> str:
    """Import it, which takes seconds; returns why that failed, or nothing."""
    try:
        import_module(package)
    except (
        Exception
    ) as error:  # however an optional package is broken, there are other kernels
        return f"{NAMES[package]} is not importable: {type(error).__name__}: {error}"
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # of its compiler
    return ""
