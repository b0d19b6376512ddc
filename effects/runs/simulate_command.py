"""`minfer simulate TRACE`: the figures of a trace under other settings, policies and
loads.

Decisions are the engine's own; times of steps are a model's. Imports no torch.
"""

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from attrs import define, evolve, field, frozen

from minfer.analysis.paired import MIN_DRAWS
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.policy_overrides import counts_of, strict_option
from minfer.effects.runs.resampled import first_seed, how_drawn, pace_range, resampled
from minfer.effects.runs.simulate_compare import (
    METHOD,
    difference_figures,
    difference_lines,
    differences,
    medians,
    remarks,
)
from minfer.effects.runs.simulate_cost import ChosenCost, choose_cost
from minfer.effects.runs.simulate_drafts import (
    add_draft_options,
    cases_with_drafts,
    draft_remarks,
    draft_results,
    with_draft_cost,
)
from minfer.effects.runs.simulate_files import check_files, write_files
from minfer.effects.runs.simulate_find import find
from minfer.effects.runs.simulate_options import (
    LIST_HELP,
    Case,
    add_options,
    cases_of,
    check_options,
)
from minfer.effects.runs.simulate_recorded import (
    CLOSED_LOOP,
    is_baseline,
    miss_lines,
    recorded_run,
)
from minfer.effects.runs.simulate_run import policy_name, run
from minfer.effects.runs.trace_files import read_trace
from minfer.journal.codec import dump
from minfer.records.config import SIZES
from minfer.simulation.cost import CostModel
from minfer.values.checks import ConfigError

Figures = dict[str, Any]


@frozen
class Column:
    """A column of the table."""

    title: str
    path: str  # in the figures
    form: str  # as a format

    def cell(self, figures: Figures) -> str:
        """The cell's text."""
        name, _, subkey = self.path.partition(".")
        value = figures[name][subkey] if subkey else figures.get(name)
        return "-" if value is None else format(value, self.form)


COLUMNS: Final = (
    Column("policy", "policy", ""),
    Column("blocks", "num_blocks", ""),
    Column("of", "block_size", ""),
    Column("seqs", "max_num_seqs", ""),
    Column("batched", "max_num_batched_tokens", ""),
    Column("speed", "speed", ".3g"),
    Column("drafts", "drafts", ""),
    Column("tok/s", "tokens_per_second", ",.0f"),
    Column("TTFT p50", "ttft.p50", ".3f"),
    Column("p99", "ttft.p99", ".3f"),
    Column("TPOT p50", "tpot.p50", ".4f"),
    Column("p99", "tpot.p99", ".4f"),
    Column("ITL p99", "itl.p99", ".4f"),
    Column("good", "good", ".1%"),
    Column("good/s", "goodput", ".2f"),
    Column("accepted", "drafted.rate", ".1%"),
    Column("length", "drafted.length", ".2f"),
    Column("hits", "hit_share", ".1%"),
    Column("preempted", "preemptions", ","),
    Column("overrides", "overrides.count", ","),
    Column("refused", "ended.rejected", ","),
    Column("unserved", "unfinished", ","),
    Column("running", "running", ".1f"),
    Column("busy", "busy", ".0%"),
    Column("took", "simulated_in", ".1f"),
)
LEGEND: Final = (
    "in seconds: TTFT, to the first token; TPOT, for each after it; ITL, between two; "
    "took, to simulate; overrides: answers of the policy that could not be used\n"
    "running: sequences that run at once, on average; busy: the share of the time with a "
    "step under way; refused: could never have run, as what is too long; unserved: "
    "neither refused nor ended when nothing could go on"
)


def simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer simulate`."""
    add_options(parser)
    add_draft_options(parser.add_argument, LIST_HELP)
    strict_option(parser)


def simulate(options: argparse.Namespace) -> int:
    """Simulate a trace and print the results; returns the exit code.

    Raises TraceError, JournalError, ConfigError and PolicyOverrideError.
    """
    try:
        return _simulate(options)
    except OSError as error:
        if error.filename is None:  # of standard output
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def _simulate(options: argparse.Namespace) -> int:
    _check_early(options)
    trace = read_trace(options.trace, options.requests, options.divide)
    cost = choose_cost(options, trace)
    cost = evolve(cost, model=with_draft_cost(options, cost.model))
    loads = _loads(trace, options)
    longest = max(max(load.sizes) for load in loads.values())
    cases = cases_of(trace, options, cost.model, longest)
    cases = cases_with_drafts(cases, options, cost.model)
    check_options(options, cases)
    for case in cases:  # before the first is run
        counts_of(case.config.policy, strict=options.strict_policy)
    about_drafts = draft_remarks(
        cases, options, draft_results(options, trace), cost.model
    )
    runs = _Runs(trace, cost.model, options, bool(about_drafts))
    if not options.json:
        heading = _heading(trace, cost, options, cases, loads)
        print("\n".join(filter(None, (*heading, about_drafts))))
        print(runs.titles)
    recorded = recorded_run(options, trace)
    if recorded is not None:
        runs.show(recorded[0])
    best = _run_all(runs, cases, loads, longest)
    lines = [*_remarks(runs, recorded, cases)]
    write_files(options, runs.figures)
    if options.json:
        results = {
            **_about(options, trace, cost),
            "runs": runs.figures,
            "find": options.find,
            "found": best,
            "recorded": recorded and recorded[0],
            "closed_loop": recorded and recorded[1],
            "differences": runs.differences,
            "remarks": lines,
        }
        print(json.dumps(results, indent=1))
    else:
        print("".join(f"{line}\n" for line in lines), end="")
        if options.find:
            value = "nothing that was tried" if best is None else f"{best:g}"
            share = f"{options.slo_share:.1%}"
            print(f"{options.find} with which {share} are good: {value}")
    if runs.interrupted:
        raise KeyboardInterrupt
    return int(bool(options.find) and best is None)


def _run_all(
    runs: "_Runs", cases: list[Case], loads: dict[int, ArrivalTrace], longest: int
) -> float | None:
    """Run what the options ask for; returns what `--find` has found."""
    if runs.options.find:
        return find(runs.options.find, longest, cases[0], runs.run_case)
    if runs.options.seeds:
        runs.run_seeds(cases, loads)
        return None
    for case in cases:
        runs.run_case(case)
    return None


def _check_early(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that need no trace to be refused."""
    if options.slo_share > 1:
        raise ConfigError(
            f"--slo-share is a share, from 0 to 1, not {options.slo_share:g}"
        )
    check_files(options)


def _about(options: argparse.Namespace, trace: ArrivalTrace, cost: ChosenCost) -> Figures:
    """What was simulated, as JSON values."""
    return {
        "trace": options.trace,
        "requests": len(trace.sizes),
        "cost": dump(cost.model),
        "cost_from": cost.reason,
        **cost.details,
    }


def _loads(trace: ArrivalTrace, options: argparse.Namespace) -> dict[int, ArrivalTrace]:
    """With `--seeds`, the load of each seed; else the trace. Raises ConfigError."""
    if options.seeds is None:
        return {0: trace}
    if options.seeds < MIN_DRAWS:
        raise ConfigError(
            f"--seeds must be {MIN_DRAWS} or more, not {options.seeds}: with fewer no "
            "interval covers a median in 95% of cases"
        )
    first = first_seed(options.trace, options.first_seed)
    return {
        seed: resampled(options.trace, trace, seed, options.requests, options.divide)
        for seed in range(first, first + options.seeds)
    }


def _remarks(
    runs: "_Runs", recorded: tuple[Figures, bool] | None, cases: list[Case]
) -> Iterator[str]:
    """What a reader must know of the rows before comparing them."""
    if runs.interrupted:
        seeds = f"{len(runs.by_case[0])} of {runs.options.seeds} seeds"
        yield f"interrupted: all figures are of the first {seeds}"
    yield from remarks(runs.names, runs.by_case)
    if recorded is None:
        return
    figures, is_closed = recorded
    if is_closed:
        yield CLOSED_LOOP
    pairs = zip(cases, runs.figures, strict=False)
    rows = [row for case, row in pairs if is_baseline(case, runs.trace)]
    yield from miss_lines(figures, rows[0] if rows else None)


def _heading(
    trace: ArrivalTrace,
    cost: ChosenCost,
    options: argparse.Namespace,
    cases: list[Case],
    loads: dict[int, ArrivalTrace],
) -> Iterator[str]:
    """Lines on the table's trace, its assumptions, and its columns."""
    count = len(trace.sizes)
    yield f"{count:,} requests of {options.trace}"
    yield f"what steps cost: {cost.model.name}"
    yield f"  {cost.reason}"
    if trace.config is None:
        yield f"{_sizes(cases)}; those that no option gives suit a 7B model on one H200"
    else:
        yield f"{_sizes(cases)}; those that no option gives, and the policy, are recorded"
    if options.seeds:
        yield (
            f"{options.seeds} seeds, {min(loads)} to {max(loads)}; rows are medians; "
            f"{how_drawn(options.trace)}{pace_range(loads.values())}"
        )
    if options.host_blocks is not None:
        yield from _host_lines(options)
    yield LEGEND
    yield _good_columns(options.slo_ttft, options.slo_tpot)
    if trace.rows and options.scheduling_policy and options.mix is None:
        yield "no request has a client, a priority or a deadline; --mix SEED draws some"


def _sizes(cases: list[Case]) -> str:
    """The sizes of engines, in words."""
    blocks, block_size, seqs, tokens = (
        " or ".join(f"{value:,}" for value in dict.fromkeys(values))
        for values in zip(
            *([getattr(case.config, size) for size in SIZES] for case in cases),
            strict=True,
        )
    )
    return (
        f"sizes: {blocks} blocks of {block_size} tokens, {seqs} sequences at once, "
        f"{tokens} tokens a step"
    )


def _host_lines(options: argparse.Namespace) -> Iterator[str]:
    """Lines on the assumptions about the host tier."""
    if options.host_page_seconds is None:
        yield (
            "moving a block to or from host memory takes what a 7B model's does over "
            "PCIe; --host-page-seconds says otherwise"
        )


def _good_columns(ttft: float, tpot: float) -> str:
    """The meaning of the columns about a service level."""
    level = []
    if ttft < math.inf:
        level.append(f"whose first token came within {ttft:g} s")
    if tpot < math.inf:
        level.append(f"whose other tokens took at most {tpot:g} s each, on average")
    if not level:
        level.append("that ended well; --slo-ttft and --slo-tpot say how fast is good")
    share = f"good: the share of answers {' and '.join(level)}"
    return f"{share}; good/s: as many of them a second (goodput)"


@define
class _Runs:
    """The results of the runs so far. Each is a line of the table; with seeds, that has
    the medians of a case.
    """

    trace: ArrivalTrace
    cost: CostModel
    options: argparse.Namespace
    speculates: bool  # in some of them
    figures: list[Figures] = field(factory=list)
    by_case: list[list[Figures]] = field(factory=list)  # and by seed
    names: list[str] = field(factory=list)  # of the cases
    differences: list[Figures] = field(factory=list)
    interrupted: bool = False  # some seeds were not run
    columns: list[Column] = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = (*SIZES, "speed")
        sought = str(self.options.find).replace("-", "_")
        varied = {name for name in settings if len(getattr(self.options, name) or ()) > 1}
        fixed = {*settings} - varied - {sought}
        if not self.speculates:
            fixed |= {"drafts", "drafted.rate", "drafted.length"}
        self.columns = [column for column in COLUMNS if column.path not in fixed]

    @property
    def titles(self) -> str:
        """The table's first line."""
        return "  ".join(f"{column.title:>8}" for column in self.columns)

    def run_case(self, case: Case) -> bool:
        """Run a case; whether enough of its requests were good."""
        options = self.options
        figures = run(
            self.trace, case, self.cost, options, options.mix, name=options.trace
        )
        self._keep(case, [figures])
        self.show(figures)
        self._show_groups(figures)
        return bool((figures["good"] or 0.0) >= self.options.slo_share)

    def run_seeds(self, cases: list[Case], loads: dict[int, ArrivalTrace]) -> None:
        """Run all cases under each load; show medians, and differences from the first.

        After an interrupt (Ctrl-C) they are those of the loads that are complete, if
        these are enough.
        """
        by_case = [list[Figures]() for _ in cases]
        try:
            for seed, load in loads.items():
                for case, runs in zip(cases, by_case, strict=True):
                    runs.append(self._run_seed(case, seed, load, runs))
        except KeyboardInterrupt:
            if len(by_case[-1]) < MIN_DRAWS:
                raise
            self.interrupted = True
        num_seeds = len(by_case[-1])
        for case, runs in zip(cases, by_case, strict=True):
            row = medians(runs[:num_seeds])
            self._keep(case, runs[:num_seeds])
            self.show(row)
            self._show_groups(row)
        self._compare(num_seeds)

    def _run_seed(
        self, case: Case, seed: int, load: ArrivalTrace, earlier: list[Figures]
    ) -> Figures:
        """Run a case under the load of a seed; `earlier` are its runs so far."""
        options = self.options
        mix = None if options.mix is None else options.mix + seed
        # A policy is warned of once; each run has its count.
        warns = not any(row["overrides"]["count"] for row in earlier)
        name = f"{options.trace}, seed {seed}" if warns else None
        figures = run(load, case, self.cost, options, mix, name=name)
        return {"seed": seed, **figures}

    def _compare(self, num_seeds: int) -> None:
        """Show the differences of the cases from the first."""
        baseline, *others = self.by_case
        if others and not self.options.json:
            print(f"\n{METHOD}")
        for name, runs in zip(self.names[1:], others, strict=True):
            found = differences(baseline, runs)
            self.differences.append(
                {
                    "from": self.names[0],
                    "to": name,
                    "figures": difference_figures(found),
                }
            )
            if not self.options.json:
                title = f"{name}, from {self.names[0]}"
                print("\n".join(difference_lines(title, found, num_seeds)))

    def _keep(self, case: Case, runs: list[Figures]) -> None:
        self.figures += runs
        self.by_case.append(runs)
        varied = [name for name in (*SIZES, "speed") if self._varies(name)]
        settings = [f"{name}={runs[0][name]}" for name in varied]
        self.names.append(" ".join([policy_name(case, self.options), *settings]))

    def _varies(self, name: str) -> bool:
        return len(getattr(self.options, name) or ()) > 1

    def show(self, figures: Figures) -> None:
        """Print a row of the table."""
        if not self.options.json:
            cells = (column.cell(figures) for column in self.columns)
            print("  ".join(f"{cell:>8}" for cell in cells), flush=True)

    def _show_groups(self, figures: Figures) -> None:
        """Print a line for each client, priority and deadline."""
        if self.options.json or self.options.find:
            return
        for name, groups in figures["groups"].items():
            for value, group in groups.items():
                print(f"    {_group_line(name, value, group)}")


def _group_line(name: str, value: str, group: Figures) -> str:
    """The figures of the requests with one value of a field."""
    cells = [
        f"TTFT p50 {_seconds(group['ttft']['p50'])} p99 {_seconds(group['ttft']['p99'])}",
        f"TPOT p50 {_seconds(group['tpot']['p50'])}",
        f"good {group['good'] or 0:.1%}",
    ]
    if "in_time" in group:
        cells.append(f"first token in time {group['in_time'] or 0:.1%}")
    return f"{name} {value or 'none'}: {group['samples']:g} answers, {', '.join(cells)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
