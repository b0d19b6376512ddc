"""The kernels of some work on a GPU, by torch's profiler: which take how long, and how a
layer's follow each other.

Kernels overlap: many are launched while the one before still runs, and wait for it
(programmatic dependent launch), so their own times add up to more than the work takes.
`added_us` is by how much a kernel's end is later than that of all before it: what would
be saved at most if it took no time.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

KINDS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH: Final = 60
SHOWN: Final = 16  # kernels of a table
Grid = tuple[int, ...]


@frozen
class Launch:
    """A kernel that ran."""

    name: str
    grid: Grid
    us: float
    added_us: float


def launches(events: Iterable[Mapping[str, Any]]) -> list[Launch]:
    """Returns the kernels of a trace in the order of their starts."""
    kernels = sorted(
        (event for event in events if event.get("cat") in KINDS),
        key=lambda event: event["ts"],
    )
    found, end = list[Launch](), float(kernels[0]["ts"]) if kernels else 0.0
    for kernel in kernels:
        start, us = float(kernel["ts"]), float(kernel["dur"])
        name = kernel["name"][:NAME_LENGTH]
        grid = (*kernel["args"].get("grid", ()),)
        added_us = max(0.0, start + us - end)
        found.append(Launch(name, grid, us, added_us))
        end += added_us
    return found


def profiled(work: Callable[[], object]) -> list[Launch]:
    """Run the work, and return the kernels that it launched."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text("utf-8"))["traceEvents"])


def by_kernel(found: Sequence[Launch], steps: int) -> list[dict[str, Any]]:
    """Returns for each kernel and grid, of one of so many steps: its launches, its own
    microseconds, and those that it added, the most first.
    """
    groups = defaultdict[tuple[str, Grid], list[Launch]](list)
    for launch in found:
        groups[launch.name, launch.grid].append(launch)
    rows = [
        {
            "kernel": name,
            "grid": grid,
            "launches": len(group) / steps,
            "us": sum(launch.us for launch in group) / steps,
            "added_us": sum(launch.added_us for launch in group) / steps,
        }
        for (name, grid), group in groups.items()
    ]
    return sorted(rows, key=lambda row: row["added_us"], reverse=True)


def report(title: str, found: Sequence[Launch], steps: int) -> list[dict[str, Any]]:
    """Print and return the kernels that added most."""
    rows = by_kernel(found, steps)
    added = sum(row["added_us"] for row in rows)
    print(f"{title}: kernels add {added:.0f} us a step", flush=True)
    for row in rows[:SHOWN]:
        print(
            f"{row['added_us']:9.1f} us added, {row['us']:9.1f} its own, "
            f"{row['launches']:6.2f} x {row['kernel']} {row['grid']}",
            flush=True,
        )
    return rows
