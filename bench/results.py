"""What all benchmarks share: command line, figures on the screen, and results as JSON.

`write` puts the commit, versions, machine, threads, date and seed beside the figures, so
that no script can forget one of them. Every script runs as `python -m bench.NAME`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
# Files that differ from the commit's, but for results, which nothing is made from.
_CHANGES = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
Measure = Callable[[argparse.Namespace], Mapping[str, Any] | None]
# Packages whose versions figures depend on. Four are extra `flash`: its kernels, the
# compiler that makes them, and what launches them; products are measured beside the last.
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "attrs",
    "immutables",
    "llguidance",
    "peft",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "humming-kernels",
)


def run(name: str, measure: Measure, options: Mapping[str, Any]) -> None:
    """Parse the command line, measure, and write what was found, if it is all.

    `options` are argparse's: a default, or all that `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--name", default=name, help="of the result file")
    for option, settings in options.items():
        settings = (
            settings
            if isinstance(settings, dict)
            else {"type": type(settings), "default": settings}
        )
        parser.add_argument(option, **settings)
    args = parser.parse_args()
    results = measure(args)
    if results is not None:
        write(args.name, results, getattr(args, "seed", None), args.folder)


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
    """Commit, versions, machine, date: what figures depend on besides the code's
    arguments.
    """
    torch = sys.modules.get("torch")  # if the benchmark uses it
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git(*_CHANGES)),  # since the commit
        "seed": seed,
        "python": platform.python_version(),
        "versions": _versions(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads() if torch else None,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of repeated measurements, and their number."""
    low, high = min(values), max(values)
    return {
        "median": median(values),
        "low": low,
        "high": high,
        "repetitions": len(values),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    middle, high = numpy.percentile(values, [50, 99])
    return {"p50": float(middle), "p99": float(high)}


def canvas(
    width: float, height: float
) -> Any:  # of matplotlib, which few benchmarks need
    """A figure of this size in inches; as SVG, the same data gives the same file."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "minfer", "font.size": 9})
    return Figure(figsize=(width, height), layout="constrained")


def show(figures: Mapping[str, Any]) -> None:
    """Print figures on one line; spreads as the median (lowest to highest)."""
    print(_text(figures), flush=True)


def _text(value: Any) -> str:
    match value:
        case {"median": median, "low": low, "high": high, "repetitions": _}:
            return f"{median:.4g} ({low:.4g} to {high:.4g})"
        case Mapping():
            return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
        case float():
            return f"{value:.4g}"
    return str(value)


def _versions() -> dict[str, str]:
    """Of packages that are there: of one that is there twice, the one imported."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _git(*arguments: str) -> str:
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:  # there is no git
        return ""
    return process.stdout.strip()  # an unpacked archive has no history


def _cpu() -> str:
    info = Path("/proc/cpuinfo")  # Linux's
    match = (
        re.search("model name\t: (.*)", info.read_text("utf-8"))
        if info.exists()
        else None
    )
    return match[1] if match else platform.processor() or platform.machine()
