"""Compile kernels for a GPU that is not there, move what was made, and see whether
launches find it: `python -m tests.kernels.cached FOLDER`.

Triton decides when it is imported whether it interprets, which the suite's process does;
so this is one of its own. Prints a line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.kernels import activation, ahead, rows
from minfer.kernels.specialization import Specialization, elsewhere, recorded

HOPPER: Final = (9, 0)
AMPERE: Final = (8, 0)
run = JITFunction.run


def launch(device: str, *sizes: int) -> None:
    """What a step of so many tokens launches, of that which compiles fast."""
    for size in sizes:
        at = torch.zeros(size, dtype=torch.int32, device=device)
        rows.scatter(at, torch.zeros(2 * size, dtype=torch.int32, device=device))
        gate_up = torch.zeros(size, 2048, dtype=torch.bfloat16, device=device)
        activation.silu_mul(gate_up)


def launched(target: tuple[int, int], *sizes: int) -> list[bool]:
    """Launch as if a GPU was there; for each kernel, whether it was found on disk."""
    hits = list[bool]()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    def compiled(kernel: Any, *of: Any, warmup: bool, **how: Any) -> Any:
        """Launches end where a GPU would begin."""
        assert not warmup
        return run(kernel, *of, warmup=True, **how)

    for kernel in (rows._scatter, activation._silu_mul):
        kernel.device_caches.clear()  # another process has none
    with (
        elsewhere(target),
        patch.object(kernels, "interpreting", True),  # the CPU's tensors are taken
        patch.object(knobs.compilation, "listener", listen),
        patch.object(JITFunction, "run", compiled),
    ):
        launch("cpu", *sizes)
    return hits


def main(folder: Path) -> dict[str, Any]:
    knobs.cache.dir = str(folder / "here")
    with recorded(HOPPER) as found:
        launch("meta", 4, 70, 4)
    told = list[tuple[int, int]]()
    made = ahead.make(found, target=HOPPER, told=lambda *far: told.append(far))
    again = ahead.make(found, target=HOPPER)
    wrong = Specialization(found[0].kernel, found[0].data.replace('"i32"', '"i3"'))
    bad = ahead.make([wrong, found[1]], target=HOPPER)
    moved = folder / "there"
    (folder / "here").rename(moved)
    knobs.cache.dir = str(moved)
    return {
        "found": [[one.kernel, one.options["launch_pdl"]] for one in found],
        "divisible": sorted(found[0].divisible),
        "constants": found[0].constants,
        "made": [made.wanted, made.compiled, made.failed],
        "told": told,
        "again": [again.wanted, again.compiled, again.failed],
        "bad": [bad.compiled, bad.failed],
        "settled": [ahead.settle(moved), ahead.settle(moved)],
        "hits": launched(HOPPER, 4, 70, 8),
        "others": launched(AMPERE, 4),
        "kernels": [len(one.asm["cubin"]) > 0 for one in made.kernels],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
