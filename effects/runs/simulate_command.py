"""`minfer simulate TRACE`: the figures of a trace under other settings, policies and
loads.

Decisions are the engine's own; times of steps are a model's. Imports no torch.
"""

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from attrs import define, evolve, field, frozen
from tqdm import tqdm

from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.policy_overrides import (
    strict_option,
    warn_of_overrides,
    without_python_warnings,
)
from minfer.effects.runs.report import Report
from minfer.effects.runs.simulate_cost import ChosenCost, choose_cost
from minfer.effects.runs.simulate_drafts import (
    add_draft_options,
    cases_with_drafts,
    draft_remarks,
    draft_results,
    with_draft_cost,
)
from minfer.effects.runs.simulate_find import find
from minfer.effects.runs.simulate_options import (
    LIST_HELP,
    Case,
    add_options,
    cases_of,
    check_options,
)
from minfer.effects.runs.trace_files import read_trace
from minfer.journal.codec import dump
from minfer.journal.overrides import OverrideCounts
from minfer.policies.builtin import POLICIES, policy_named
from minfer.records.config import SIZES
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
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
        value = figures[name][subkey] if subkey else figures[name]
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
    "took, to simulate; overrides: answers of the policy that could not be used"
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
    if options.slo_share > 1:
        raise ConfigError(
            f"--slo-share is a share, from 0 to 1, not {options.slo_share:g}"
        )
    trace = read_trace(options.trace, options.requests, options.divide)
    cost = choose_cost(options, trace)
    cost = evolve(cost, model=with_draft_cost(options, cost.model))
    cases = cases_with_drafts(cases_of(trace, options), options, cost.model)
    check_options(options, cases)
    about_drafts = draft_remarks(
        cases, options, draft_results(options, trace), cost.model
    )
    runs = _Runs(trace, cost.model, options, bool(about_drafts))
    if not options.json:
        print("\n".join(filter(None, (*_heading(trace, cost, options), about_drafts))))
        print(runs.titles)
    best = None
    if options.find:
        best = find(options.find, max(trace.sizes), cases[0], runs.run_case)
    else:
        for case in cases:
            runs.run_case(case)
    if options.json:
        results = {
            "trace": options.trace,
            "requests": len(trace.sizes),
            "cost": dump(cost.model),
            "cost_from": cost.reason,
            **cost.details,
            "runs": runs.figures,
            "find": options.find,
            "found": best,
        }
        print(json.dumps(results, indent=1))
    elif options.find:
        value = "nothing that was tried" if best is None else f"{best:g}"
        print(f"{options.find} with which {options.slo_share:.1%} are good: {value}")
    return int(bool(options.find) and best is None)


def _heading(
    trace: ArrivalTrace, cost: ChosenCost, options: argparse.Namespace
) -> Iterator[str]:
    """Lines on the table's trace, its assumptions, and its columns."""
    count = len(trace.sizes)
    yield f"{count:,} requests of {options.trace}"
    yield f"what steps cost: {cost.model.name}"
    yield f"  {cost.reason}"
    if trace.config is None:
        yield "sizes that no option gives suit a 7B model on one H200"
    else:
        yield "sizes and the policy that no option gives are those of the recorded run"
    yield LEGEND
    yield _good_columns(options.slo_ttft, options.slo_tpot)
    if trace.rows and options.scheduling_policy and options.mix is None:
        yield "no request has a client, a priority or a deadline; --mix SEED draws some"


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
    """The results of the runs so far, each a line of the table."""

    trace: ArrivalTrace
    cost: CostModel
    options: argparse.Namespace
    speculates: bool  # in some of them
    figures: list[Figures] = field(factory=list)
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
        figures = run(self.trace, case, self.cost, self.options)
        self.figures.append(figures)
        if not self.options.json:
            cells = (column.cell(figures) for column in self.columns)
            print("  ".join(f"{cell:>8}" for cell in cells), flush=True)
        return bool((figures["good"] or 0.0) >= self.options.slo_share)


def run(
    trace: ArrivalTrace, case: Case, cost: CostModel, options: argparse.Namespace
) -> Figures:
    """Simulate the trace once; returns the settings and the results."""
    config = case.config
    names = options.scheduling_policy or ()
    named = (name for name in names if policy_named(name) == config.policy)
    usual = (name for name, kind in POLICIES.items() if kind is type(config.policy))
    name = next(chain(named, usual), type(config.policy).__name__)
    sizes = {size: getattr(config, size) for size in SIZES}
    results = {"policy": name, **sizes, "speed": case.speed}
    if config.speculation is not None or options.num_speculative_tokens is not None:
        results["drafts"] = config.speculation.drafts if config.speculation else 0
    overrides = OverrideCounts(options.strict_policy)
    report = Report(config, options.slo_ttft, options.slo_tpot, overrides=overrides)
    arrivals = trace.arrivals(config.block_size, case.speed, options.mix)
    shown = tqdm(arrivals, name, len(trace.sizes), leave=False, disable=None)
    guesses = draft_results(options, trace)
    simulation = Simulation(
        config,
        Simulated(trace.lengths, guesses=guesses),
        cost,
        report.note_arrivals(shown),
        guesses=guesses,
    )
    turns = report.fold_turns(simulation.turns())
    begin = time.perf_counter()
    with paused_collector(), without_python_warnings():
        if options.journal is None:
            deque(turns, maxlen=0)
        else:
            options.journal.mkdir(parents=True, exist_ok=True)
            path = options.journal / f"{'-'.join(map(str, results.values()))}.journal"
            origin = {"simulated": options.trace, "cost": cost.name}
            write_journal(path, config, turns, origin)
    warn_of_overrides(options.trace, config.policy, overrides)
    return {**results, **report.figures(), "simulated_in": time.perf_counter() - begin}
