"""The result of a load: a table, and a JSON file, in the form of `vllm bench serve`."""

import argparse
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from minfer.effects.runs.load.load_client import LoadPlan
from minfer.effects.runs.load.load_metrics import LATENCIES, Metrics
from minfer.effects.runs.load.request_record import LoadError
from minfer.version import __version__

_WIDTH: Final = 50
_TITLES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_ROWS: Final = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Interrupted requests:", "interrupted"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
)


def table(metrics: Metrics) -> str:
    """The numbers of a run, and its failures."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for title, name in _ROWS:
        if name in metrics:
            lines.append(_row(title, metrics[name]))
    lines += _latencies(metrics)
    lines.append("=" * _WIDTH)
    for kind, failed in metrics["failures"].items():
        lines.append(f"{failed['requests']:,} failed ({kind}), first: {failed['first']}")
    return "\n".join(lines)


def _latencies(metrics: Metrics) -> Iterator[str]:
    for latency in LATENCIES:
        suffix = f"_{latency}_ms"
        names = [name for name in metrics if name.endswith(suffix)]
        if metrics[f"mean{suffix}"] is not None:
            yield f"{_TITLES[latency]:-^{_WIDTH}}"
            for name in names:
                title = name.removesuffix(suffix).capitalize()
                yield _row(f"{title} {latency.upper()} (ms):", metrics[name])


def _row(title: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {shown}"


def result_path(options: argparse.Namespace, model: str) -> Path | None:
    """The path for the numbers; None if they are not saved. Raises LoadError if nothing
    can be written there.
    """
    path: Path | None = options.result_filename
    if path is None:
        if not options.save_result:
            return None
        rate = f"{options.request_rate:g}qps"
        now = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        path = Path(f"{options.backend}-{rate}-{model.rpartition('/')[2]}-{now}.json")
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}; name another place") from None
    return path


def _plain(value: Any) -> Any:
    """A setting as a JSON value, without infinities and paths."""
    if isinstance(value, Path):
        return str(value)
    return "inf" if value == float("inf") else value


def save(
    path: Path, options: argparse.Namespace, load: LoadPlan, metrics: Metrics
) -> None:
    """Write the numbers of a run and its settings."""
    settings = {
        name: _plain(value)
        for name, value in vars(options).items()
        if isinstance(value, str | int | float | tuple | Path | None)
    }
    settings |= {
        "goodput": {name: _plain(goal) for name, goal in options.goodput},
        "date": f"{datetime.now().astimezone():%Y%m%d-%H%M%S}",
        "minfer": __version__,
        "url": load.url,
        "model_id": load.model,
        "num_prompts": load.count,
    }
    path.write_text(json.dumps({**settings, **metrics}, indent=1) + "\n", "utf-8")
