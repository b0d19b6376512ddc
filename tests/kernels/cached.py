"""Compile kernels for a GPU that is not there, twice: `python -m tests.kernels.cached
FOLDER`; and in a folder that cannot be written.

Triton decides when it is imported whether it interprets, which the suite's process does;
so this is one of its own. Prints a line of JSON.
"""

import errno
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.effects.execution.warming import kernel_folder
from minfer.kernels import activation, rows
from minfer.kernels.compiling import compile_launches, watch_compilations
from tests.kernels.specialization import elsewhere

HOPPER: Final = (9, 0)


@triton.jit
def _wrong(x):  # type: ignore[no-untyped-def]  # as kernels are
    tl.store(x, tl.no_such_thing(x))


def launch(*sizes: int) -> None:
    """Launch the kernels of steps of these sizes that compile fast."""
    for size in sizes:
        places = torch.ones(size, dtype=torch.int32)
        rows.scatter(places, torch.ones(2 * size, dtype=torch.int32))
        gated = activation.gated_mul(torch.ones(size, 2048, dtype=torch.bfloat16))
        assert not gated.any(), "it did not run, and what it would write is zero"


def forget(loaded: list[str]) -> None:
    """As another process, which has compiled and loaded none."""
    for kernel in (rows._scatter, activation._gated_mul):
        kernel.device_caches.clear()
    loaded.clear()


def main(folder: Path) -> dict[str, Any]:
    knobs.cache.dir = str(folder)
    watched = watch_compilations()
    progress, run, report = list[int](), JITFunction.run, dict[str, Any]()
    loaded = list[str]()

    def load(kernel: Any) -> None:
        """Instead of loading it to a GPU."""
        loaded.append(kernel.name)
        kernel._run = lambda: None

    with (
        elsewhere(HOPPER),
        patch.object(kernels, "interpreting", True),  # the CPU's tensors are taken
        patch.object(CompiledKernel, "_init_handles", load),
    ):
        for name in ("first", "second"):
            forget(loaded)
            counts = compile_launches(lambda: launch(4, 4, 70), progress.append)
            report[name] = [
                counts.requested,
                counts.compiled,
                counts.failed,
                sorted(loaded),
            ]
        forget(loaded)
        x = torch.zeros(4)

        def launch_wrong() -> None:
            _wrong[(1,)](x)
            launch(5)

        counts = compile_launches(launch_wrong, progress.append)
        report["wrong"] = [counts.requested, sorted(loaded), counts.failed]
        report["spare"] = in_spare_folder(folder, loaded, progress)
    assert JITFunction.run is run
    return report | {"progress": progress, "watched": [c.kernel for c in watched]}


def in_spare_folder(
    folder: Path, loaded: list[str], progress: list[int]
) -> list[list[Any]]:
    """Compile what is there, and more, in a process that cannot write the folder, and
    again in the next one.
    """
    problem, results = kernel_folder.write_problem, list[list[Any]]()

    def full(path: Path) -> str:
        return os.strerror(errno.ENOSPC) if path == folder else problem(path)

    spare = folder.parent / "spare"
    spare.mkdir()
    before = sorted(folder.rglob("*"))
    with (
        patch.object(kernel_folder, "write_problem", full),
        patch.object(tempfile, "tempdir", str(spare)),
    ):
        for _ in range(2):
            knobs.cache.dir = str(folder)
            kernel_folder.prepare_kernel_folder()
            forget(loaded)
            counts = compile_launches(lambda: launch(4, 4, 70), progress.append)
            more = compile_launches(launch_more, progress.append)
            results.append([counts.compiled, more.compiled, counts.failed + more.failed])
    assert sorted(folder.rglob("*")) == before
    return results


def launch_more() -> None:
    """Launch a kernel that was not compiled yet."""
    activation.gated_mul(torch.ones(4, 2048, dtype=torch.float16))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
