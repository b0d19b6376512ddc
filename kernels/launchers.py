"""What launches kernels, built without a GPU, so that a start needs no C compiler.

Triton 3.6 writes a C program for each signature of a kernel, which passes its arguments
to CUDA's driver, and keeps what was built of it in its cache beside the kernels. It is
linked with the driver's library, which a machine without a GPU has not; but nothing of
that is looked up before it is loaded, so an empty library of that name will do. Later
versions launch everything by one program, whose key depends on where that library is: it
is built on the machine with the GPU, once.
"""

import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

LIBRARY: Final = "libcuda.so.1"


def build_launchers(kernels: Iterable[Any]) -> str:
    """Have the C compiler build what launches Triton's `kernels`, where this version of
    Triton does; returns why that failed, or nothing.
    """
    if not hasattr(nvidia, "make_launcher"):
        return ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _empty_library(Path(folder))
            places = [nvidia.libdevice_dir, folder]
            with (
                patch.object(nvidia, "library_dirs", lambda: places),
                # What was built cannot be loaded here.
                patch.object(build, "_load_module_from_path", _not_loaded),
                ThreadPoolExecutor(thread_name_prefix="build") as pool,
            ):
                list(pool.map(_build, kernels))
                _build_utilities(places)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _build(kernel: Any) -> None:
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _build_utilities(places: list[str]) -> None:
    """What loads kernels."""
    nvidia.compile_module_from_src(
        src=(Path(nvidia.dirname) / "driver.c").read_text(),
        name="cuda_utils",
        library_dirs=places,
        include_dirs=nvidia.include_dirs,
        libraries=nvidia.libraries,
    )


def _not_loaded(_name: str, _path: str) -> SimpleNamespace:
    return SimpleNamespace(launch=None)


def _empty_library(folder: Path) -> None:
    """A library with the driver's name, and nothing in it."""
    source = folder / "empty.c"
    source.write_text("")
    built = folder / LIBRARY
    command = ["cc", "-shared", f"-Wl,-soname,{LIBRARY}", "-o", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
