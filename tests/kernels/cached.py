"""Compile kernels for a GPU that is not there, twice: `python -m tests.kernels.cached
FOLDER`.

Triton decides when it is imported whether it interprets, which the suite's process does;
so this is one of its own. Prints a line of JSON.
"""

import json
import sys
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
from minfer.kernels import activation, rows
from minfer.kernels.compiling import compile_launches
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
    assert JITFunction.run is run
    return report | {"progress": progress}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
