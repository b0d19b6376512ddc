"""Optional kernels of other packages: flash-attn-4, quack-kernels."""

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
# quack recognises its caller's code by these folders, and refuses a package that it takes
# for the caller's: CUTLASS, if it was unpacked elsewhere (quack 0.6.2 to 0.6.5).
INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


def missing(package: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why a package cannot serve this dtype on this device; empty if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"{NAMES[package]} is used on Hopper GPUs only"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{NAMES[package]} takes bfloat16 and float16, not {dtype}"
    top, module, *_ = package.split(".")
    if not any(
        (folder / module).exists() or (folder / f"{module}.py").exists()
        for folder in _package_folders(top)
    ):
        return f"{NAMES[package]} is not installed"
    return _misplaced() if package == QUACK else ""


def _misplaced() -> str:
    """Why quack would refuse CUTLASS in its folder; empty if it would not."""
    for place in _package_folders("cutlass"):
        if INSTALLED.isdisjoint(place.parts):
            return (
                f"{NAMES[QUACK]} works only beside a CUTLASS in a folder named "
                f"site-packages: install both there, not in {place}"
            )
    return ""


def _package_folders(top: str) -> list[Path]:
    """Folders of an importable package, found without importing it."""
    spec = find_spec(top)
    folders = spec.submodule_search_locations if spec else None
    return [Path(folder) for folder in folders or ()]


@cache
def load(package: str) -> str:
    """Import it, which takes seconds; returns why that failed, or an empty string."""
    try:
        import_module(package)
    except Exception as error:  # any error: there are other kernels
        return f"{NAMES[package]} is not importable: {type(error).__name__}: {error}"
    # A warning of the compiler that both packages contain.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    return ""
