"""What was measured, as a table and as JSON."""

import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

import minfer
from minfer.effects.cli.compare.measure_level import RUNS_PER_BATCH, MeasuredLoad
from minfer.effects.cli.compare.results import LevelResult
from minfer.effects.cli.compare.text_windows import TextWindows
from minfer.effects.setup.device import DeviceInfo
from minfer.effects.setup.memory import size_text

PACKAGES: Final = ("torch", "triton", "transformers", "numpy")
UNITS: Final = {
    "memory": "bytes",
    "kl_divergence": "nats",
    "top1_agreement": "share",
    "ttft": "seconds",
    "tpot": "seconds",
    "throughput": "output tokens a second",
}
_NO_VALUE: Final = "-"

Cell = Callable[[LevelResult], str]


@frozen(kw_only=True)
class Comparison:
    """All levels, the base first, and what they were measured with."""

    device: DeviceInfo
    threads: int  # of torch, of a thread that has not set its own
    text: TextWindows
    load: MeasuredLoad
    is_random: bool  # whether the weights are
    levels: tuple[LevelResult, ...]


def table(comparison: Comparison) -> str:
    """Returns the comparison for a terminal: a column for each level."""
    load, text, device = comparison.load, comparison.text, comparison.device
    windows = f"{len(text.windows)} windows of {text.length} tokens"
    tokens = f"{load.prompt} prompt tokens, {load.output} output tokens"
    facts = [
        ("model", comparison.levels[0].model),
        ("device", f"{device.name}, {processor()}, {comparison.threads} threads"),
        ("text", f"{text.file}: {text.positions} positions in {windows}"),
        ("load", f"{tokens}; medians of {RUNS_PER_BATCH} runs"),
        ("base", labels(comparison)[0]),
    ]
    if comparison.is_random:
        facts.append(("weights", "random: figures of the text say nothing about a model"))
    lines = [f"{name:<8}{value}" for name, value in facts]
    header = ["", *labels(comparison)]
    rows = [[name, *map(cell, comparison.levels)] for name, cell in _cells(comparison)]
    return "\n".join([*lines, "", *_aligned([header, *rows])])


def labels(comparison: Comparison) -> list[str]:
    """Returns short names of the levels: of a checkpoint's, the last part of its path."""
    names = [level.level for level in comparison.levels]
    short = [name.rstrip("/").rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(short) else names


def _cells(comparison: Comparison) -> list[tuple[str, Cell]]:
    """Returns the table's rows: a name, and what it says of a level."""
    base = comparison.levels[0].memory.weights_held
    rows: list[tuple[str, Cell]] = [
        ("dtype", lambda level: level.dtype),
        ("weights, planned", lambda level: size_text(level.memory.weights_planned)),
        ("weights, held", lambda level: size_text(level.memory.weights_held)),
        ("  of the base's", lambda level: f"{level.memory.weights_held / base:.1%}"),
        ("KV cache, planned", lambda level: size_text(level.memory.kv_planned)),
        ("KV cache, held", lambda level: size_text(level.memory.kv_held)),
        ("KV of a token", lambda level: size_text(level.memory.kv_of_token)),
        *_state_cells(comparison),
        ("perplexity", lambda level: f"{level.quality.perplexity:.4f}"),
        ("  to the base's", lambda level: _change(level, comparison.levels[0])),
        (
            "KL divergence",
            lambda level: _or_none(level.quality.kl_divergence, "{:.3g} nats"),
        ),
        (
            "top-1 agreement",
            lambda level: _or_none(level.quality.top1_agreement, "{:.2%}"),
        ),
    ]
    for i, batch in enumerate(comparison.load.batches):
        rows += _speed_cells(i, batch)
    return rows


def _state_cells(comparison: Comparison) -> list[tuple[str, Cell]]:
    """Returns the row of states, if a level has recurrent layers."""
    if not any(level.memory.state for level in comparison.levels):
        return []
    return [("state of a sequence", lambda level: size_text(level.memory.state))]


def _speed_cells(i: int, batch: int) -> list[tuple[str, Cell]]:
    """Returns the rows of the speed of a batch, which is number `i`."""
    return [
        (f"TTFT, batch {batch}", lambda level: f"{level.speeds[i].ttft * 1000:.2f} ms"),
        (f"TPOT, batch {batch}", lambda level: f"{level.speeds[i].tpot * 1000:.3f} ms"),
        (
            f"output, batch {batch}",
            lambda level: f"{level.speeds[i].throughput:.1f} tok/s",
        ),
    ]


def _change(level: LevelResult, base: LevelResult) -> str:
    """Returns by how much a level's perplexity differs from the base's."""
    ratio = level.quality.perplexity / base.quality.perplexity
    return _NO_VALUE if level is base else f"{ratio - 1:+.2%}"


def _or_none(value: float | None, template: str) -> str:
    return _NO_VALUE if value is None else template.format(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines in columns: names to the left, values to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison with its circumstances, for json.dumps; a figure that is not
    finite is null.
    """
    text = comparison.text
    tree = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minfer": minfer.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {d.name: d.version for p in PACKAGES for d in distributions(name=p)},
        "device": {
            "kind": comparison.device.kind,
            "name": comparison.device.name,
            "processor": processor(),
            "cores": os.cpu_count(),
            "torch_threads": comparison.threads,
        },
        "text": {
            "file": text.file,
            "sha256": text.sha256,
            "window": text.length,
            "windows": len(text.windows),
            "positions": text.positions,
        },
        "load": {**asdict(comparison.load), "runs": RUNS_PER_BATCH},
        "random_weights": comparison.is_random,
        "units": UNITS,
        "levels": [asdict(level) for level in comparison.levels],
    }
    finite: dict[str, Any] = _finite(tree)
    return finite


def _finite(value: Any) -> Any:
    """Returns a tree of JSON, with None for numbers that it has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    """Returns minfer's commit, if this is a clone."""
    root = Path(minfer.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()


def processor() -> str:
    """Returns the name of the processor."""
    info = Path("/proc/cpuinfo")  # Linux's
    text = info.read_text("utf-8") if info.exists() else ""
    match = re.search("model name\t: (.*)", text)
    return match[1] if match else platform.processor() or platform.machine()
