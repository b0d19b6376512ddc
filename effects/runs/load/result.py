"""The result of a load: a table for people, and a file with all figures and what they
depend on.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.effects.runs.load.figures import Figures, over_runs
from minfer.effects.runs.load.options import base_url
from minfer.effects.runs.load.record import Record
from minfer.version import __version__

_SECRET: Final = ("api_key", "run", "policies")  # no settings, or nobody's business
_COLUMNS: Final = ("mean", "median", "p90", "p95", "p99")


@frozen
class Latency:
    """A row of the table."""

    name: str
    where: str  # in the figures


LATENCIES: Final = (
    Latency("TTFT, to the first token", "ttft_ms"),
    Latency("TPOT, each after it", "tpot_ms"),
    Latency("ITL, between tokens", "itl_ms"),
    Latency("  between events", "event_gap_ms"),
    Latency("E2EL, to the last", "e2el_ms"),
)
# What is told of several runs: title, path in the figures, unit.
OVER: Final = (
    ("requests", "request_throughput", "/s"),
    ("output tokens", "output_throughput", "/s"),
    ("  steady", "steady.output_throughput", "/s"),
    ("TTFT median", "ttft_ms.median", " ms"),
    ("TPOT median", "tpot_ms.median", " ms"),
    ("ITL p99", "itl_ms.p99", " ms"),
    ("goodput", "goodput.request_goodput", "/s"),
)


def table(figures: Figures) -> str:
    """The figures of a run, for people."""
    return "\n".join([*_heading(figures), *_latencies(figures), *_ending(figures)])


def _heading(figures: Figures) -> Iterator[str]:
    ended = f"{figures['completed']:,} of {figures['requests']:,} answered"
    more = f", {figures['interrupted']:,} given up" if figures["interrupted"] else ""
    yield (
        f"requests      {ended}, {figures['failed']:,} failed{more}, "
        f"in {figures['duration']:.2f} s"
    )
    for kind, told in figures["failures"].items():
        yield f"  failed      {told['requests']:,} {kind}; the first: {told['first']}"
    yield (
        f"tokens        {figures['total_input_tokens']:,} in, "
        f"{figures['total_output_tokens']:,} out"
    )
    yield (
        f"throughput    {figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:,.1f} output tokens/s, "
        f"{figures['total_token_throughput']:,.1f} in and out"
    )
    steady = figures["steady"]
    if steady:
        yield (
            f"  steady      {steady['request_throughput']:.2f} requests/s, "
            f"{steady['output_throughput']:,.1f} output tokens/s, from "
            f"{steady['begin']:.2f} to {steady['end']:.2f} s"
        )
    yield (
        f"at once       {figures['mean_concurrent_requests']:.1f} on average, "
        f"{figures['max_concurrent_requests']:,} at most"
    )


def _latencies(figures: Figures) -> Iterator[str]:
    rows = [(one.name, figures[one.where]) for one in LATENCIES if figures[one.where]]
    if rows:
        titles = "".join(f"{title:>11}" for title in _COLUMNS)
        yield f"\n{'milliseconds':<26}{titles}"
    for name, found in rows:
        cells = "".join(f"{found[column]:>11,.2f}" for column in _COLUMNS)
        yield f"{name:<26}{cells}"


def _ending(figures: Figures) -> Iterator[str]:
    goodput = figures.get("goodput")
    yield ""
    if goodput:
        goals = ", ".join(f"{name} {ms:g} ms" for name, ms in goodput["goals_ms"].items())
        yield (
            f"goodput       {goodput['request_goodput']:.2f} requests/s, "
            f"{goodput['share']:.1%} of all, with {goals}"
        )
    cpu = figures["client_cpu"]
    if cpu:
        one = len(cpu) == 1
        yield (
            f"clients       {len(cpu)} process{'' if one else 'es'}; the busiest used "
            f"{max(cpu):.0%} of a core"
        )


def over_all(runs: Sequence[Figures]) -> str:
    """The main figures of several runs: median, lowest and highest."""
    lines = [f"over {len(runs)} runs: median (lowest to highest)"]
    for title, path, unit in OVER:
        found = over_runs(runs, path)
        if found is not None:
            lines.append(
                f"{title:<14}{found.median:,.2f}{unit} "
                f"({found.low:,.2f} to {found.high:,.2f})"
            )
    return "\n".join(lines)


def write(
    path: Path,
    options: argparse.Namespace,
    model: str,
    runs: Sequence[Figures],
    records: Sequence[Sequence[Record]],
) -> None:
    """Write the file; `records` are those of each run, or empty."""
    told: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minfer": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": model,
        "settings": _settings(options),
        "runs": [dict(one) for one in runs],
    }
    for run, each in zip(told["runs"], records, strict=False):
        run["records"] = [_told(one) for one in each]
    path.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON has them; it has no infinity."""
    found: dict[str, Any] = {}
    for name, value in sorted(vars(options).items()):
        if name not in _SECRET:
            plain = str(value) if isinstance(value, Path) else value
            found[name] = "inf" if value == float("inf") else plain
    return {**found, "base_url": base_url(options)}


def _told(record: Record) -> dict[str, Any]:
    """A request by itself, in seconds since the run began."""
    told = attrs.asdict(record, recurse=False)
    failure = record.failure
    return {
        **told,
        "events": list(record.events),
        "tokens": list(record.tokens),
        "failure": attrs.asdict(failure) if failure else None,
    }
