"""Results of benchmarks as JSON, with what is needed to judge and repeat them.

`write` puts the commit, versions, machine, threads, date and seed beside the figures, so that no
script can forget one of them.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "transformers", "numpy", "attrs", "immutables", "triton")


def write(
    name: str, data: Mapping[str, Any], seed: int | None = None, folder: Path = RESULTS
) -> Path:
    """Write `data` and its circumstances to `folder`/`name`.json; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({"name": name, **circumstances(seed), "results": data}, indent=1)
    path.write_text(text + "\n", "utf-8")
    return path


def circumstances(seed: int | None) -> dict[str, Any]:
    """Commit, versions, machine, date: what figures depend on besides the code's arguments."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),  # since the commit
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": _threads(),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest of repeated measurements, and their number."""
    return {
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "repetitions": len(values),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # an unpacked archive has no history
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """The processor's name, from Linux where there is one."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _threads() -> int | None:
    """Threads that torch uses, if the benchmark uses torch."""
    import sys

    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else None
