"""`minfer bench serve`: a load on a server, and its figures."""

import argparse
import sys
from pathlib import Path
from typing import Self

from attrs import define, field
from tqdm import tqdm

from minfer.effects.runs.load import figures, plot, result
from minfer.effects.runs.load.client import Counts
from minfer.effects.runs.load.figures import Figures
from minfer.effects.runs.load.http import read_address
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.making import check, load_of
from minfer.effects.runs.load.options import base_url
from minfer.effects.runs.load.processes import default_processes, put
from minfer.effects.runs.load.record import LoadError, Record
from minfer.effects.runs.load.server import find_model, warm_up

FAILED = 1  # exit codes, as those of all commands
INTERRUPTED = 130


def bench_serve(options: argparse.Namespace) -> int:
    """Put a load on a server and print what came of it; returns the exit code.

    Raises LoadError and TraceError.
    """
    goals = figures.read_goals(options.goodput)
    check(options)
    _check_files(options)
    served = find_model(read_address(base_url(options)), options.api_key, options.model)
    load = load_of(options, served.model)
    warm_up(load, options.warmup)
    print(_heading(load, options), flush=True)
    runs = _Runs(options, served.model, load, goals)
    try:
        runs.all()
    finally:
        runs.save()
    if runs.figures[-1]["stopped"]:
        return INTERRUPTED
    lost = any(one["failed"] or one["clients_lost"] for one in runs.figures)
    return FAILED if lost else 0


def _check_files(options: argparse.Namespace) -> None:
    """Raise LoadError if results could not be written after the load."""
    if options.plot is not None:
        plot.check_plot(options.plot)
    paths: list[Path] = [path for path in (options.json, options.plot) if path]
    for path in paths:
        there = path.exists()
        try:
            path.open("a").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise LoadError(f"{path}: {error.strerror}; name another place") from None


def _heading(load: Load, options: argparse.Namespace) -> str:
    count = "requests" if load.count is None else f"{load.count:,} requests"
    how = []
    if load.due:
        last = load.due[-1]
        rate = f"{(len(load.due) - 1) / last:.3g} a second" if last > 0 else "at once"
        how.append(f"{rate} as the trace has them" if options.trace else rate)
    if load.max_concurrency is not None:
        how.append(f"at most {load.max_concurrency:,} at once")
    if load.duration is not None:
        how.append(f"for {load.duration:g} s")
    target = load.target
    where = f"{target.address.url}{target.path}"
    return f"{count} to {target.model} at {where}, {', '.join(how or ['all at once'])}"


@define
class _Runs:
    """What came of the runs so far."""

    options: argparse.Namespace
    model: str
    load: Load
    goals: dict[str, float]
    figures: list[Figures] = field(factory=list)
    records: list[list[Record]] = field(factory=list)

    def all(self) -> None:
        """Run as often as is wanted, unless somebody stops it."""
        options, load = self.options, self.load
        processes = options.processes or default_processes(load.max_concurrency)
        for run in range(options.repeat):
            with _Progress(load) as progress:
                outcome = put(load.of_run(run), processes, progress.show)
            found = figures.figures_of(outcome, self.goals)
            self.figures.append(found)
            self.records.append(outcome.records)
            title = f"run {run + 1} of {options.repeat}\n" if options.repeat > 1 else ""
            print(f"\n{title}{result.table(found)}", flush=True)
            doubts = figures.warnings(
                found, open_loop=bool(load.due), lanes=load.max_concurrency
            )
            for doubt in doubts:
                print(f"minfer: {doubt}", file=sys.stderr, flush=True)
            if outcome.stopped:
                return
        if options.repeat > 1:
            print(f"\n{result.over_all(self.figures)}")

    def save(self) -> None:
        """Write what files are wanted, of the runs that there were."""
        options = self.options
        if options.json is not None:
            each = self.records if options.save_detailed else []
            result.write(options.json, options, self.model, self.figures, each)
        if options.plot is not None and self.records:
            plot.draw(options.plot, self.records[-1])


class _Progress:
    """A line on a terminal that says how far a run is."""

    def __init__(self, load: Load) -> None:
        self._bar = tqdm(total=load.count, unit=" requests", leave=False, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, counts: Counts) -> None:
        """Say it."""
        self._bar.n = counts.ended
        way = counts.sent - counts.ended
        self._bar.set_postfix_str(f"{way} on their way, {counts.failed} failed")
