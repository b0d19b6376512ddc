"""The figures of simulations as files: a table of comma-separated values, and a plot."""

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from minfer.effects.runs.report import SPREADS
from minfer.effects.runs.simulate_compare import COMPARED, value_at
from minfer.extras import how_to_install
from minfer.values.checks import ConfigError

Figures = dict[str, Any]
_PLOTTED: Final = ("tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "good/s")
_SUFFIXES: Final = (".png", ".svg", ".pdf")
_SETTINGS: Final = ("policy", "num_blocks", "block_size", "max_num_seqs", "speed")


def write_files(options: argparse.Namespace, runs: list[Figures]) -> None:
    """Write the files that the options ask for. Raises ConfigError."""
    if options.csv is not None:
        write_csv(options.csv, runs)
    if options.plot is not None:
        write_plot(options.plot, runs)


def write_csv(path: Path, runs: list[Figures]) -> None:
    """Write a line for each run, and a column for each number, such as `ttft.p99`."""
    rows = [dict(_flat(run)) for run in runs]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The names and values of nested figures, with a dot between names."""
    cells = list[tuple[str, Any]]()
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            cells += _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, list):
            cells.append((f"{prefix}{name}", inner))
    return cells


def check_files(options: argparse.Namespace) -> None:
    """Raise ConfigError if a file that the options ask for cannot be written."""
    for option, path in (
        ("--csv", options.csv),
        ("--plot", options.plot),
        ("--save-cost", options.save_cost),
    ):
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: its folder is not there; make it first")
    if options.plot is not None:
        _check_plot(options.plot)


def _check_plot(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: its name must end in {', '.join(_SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401  # to see whether it is installed
    except ModuleNotFoundError:
        raise ConfigError(f"--plot needs matplotlib: {how_to_install('bench')}") from None


def write_plot(path: Path, runs: list[Figures]) -> None:
    """Plot a panel for each figure: each run as a dot, and the median of each policy as a
    line.
    """
    from matplotlib.figure import Figure  # takes a while, and is needed here only

    names = _distinct(runs)
    labels = [*dict.fromkeys(names)]
    shown = [figure for figure in COMPARED if figure.title in _PLOTTED]
    plot = Figure(figsize=(11, 6), layout="constrained")
    panels = plot.subplots(2, 3).flat
    for panel, figure in zip(panels, shown, strict=True):
        for place, label in enumerate(labels):
            values = [
                value_at(run, figure.path)
                for run, name in zip(runs, names, strict=True)
                if name == label
            ]
            values = [value for value in values if value is not None]
            if values:
                panel.plot([place] * len(values), values, "o", alpha=0.5)
                middle = median(values)
                panel.plot([place - 0.3, place + 0.3], [middle, middle], "k-")
        is_duration = figure.path[0] in SPREADS
        panel.set_title(f"{figure.title}, seconds" if is_duration else figure.title)
        panel.set_xticks(range(len(labels)), labels, rotation=20, fontsize=8)
        panel.set_ylim(bottom=0)
    plot.savefig(path)


def _distinct(runs: list[Figures]) -> list[str]:
    """A name for each run: its policy, and the settings in which runs differ."""
    varied = [name for name in _SETTINGS[1:] if len({run[name] for run in runs}) > 1]
    return [
        "\n".join([run["policy"], *(f"{name} {run[name]}" for name in varied)])
        for run in runs
    ]
