"""Forks for users: a run as recorded, unchanged and changed, side by side."""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from typing import Any, Final

from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.costs import H200, fit, measured_steps, read_cost
from minfer.effects.runs.policy_overrides import (
    counts_of,
    warn_of_overrides,
    without_python_warnings,
)
from minfer.effects.runs.replay_state import summary_line
from minfer.effects.runs.report import Report
from minfer.effects.runs.simulate_drafts import (
    DRAFTS_NEEDED,
    add_draft_options,
    free_draft_remark,
    with_draft_cost,
    with_drafts,
)
from minfer.effects.runs.simulate_options import with_block_size, with_blocks
from minfer.journal.replay import Journal
from minfer.policies.builtin import policy_named
from minfer.records.config import SIZES, EngineConfig
from minfer.records.speculation import Speculation
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.fork import Change, Fork, fork
from minfer.simulation.guesses import Guesses
from minfer.values.checks import ConfigError

Figures = dict[str, Any]
_OF_DRAFTS: Final = ("accepted", "length")
_FIGURES: Final = {  # title -> where it is in a report's figures
    "tokens/s": ("tokens_per_second",),
    "TTFT p50": ("ttft", "p50"),
    "TTFT p99": ("ttft", "p99"),
    "TPOT p50": ("tpot", "p50"),
    "TPOT p99": ("tpot", "p99"),
    "ITL p99": ("itl", "p99"),
    "accepted": ("drafted", "rate"),
    "length": ("drafted", "length"),
    "preemptions": ("preemptions",),
    "overrides": ("overrides", "count"),
    "cached": ("hit_share",),
    "seconds": ("seconds",),
    "refused": ("ended", "rejected"),
}


def fork_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a fork."""
    group = parser.add_argument_group(
        "fork",
        "change one thing at turn N (default: the first) and go on with modelled steps",
    )
    add = group.add_argument
    add(
        "--scheduling-policy",
        metavar="NAME",
        help="another policy, named as for minfer serve",
    )
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help="another size")
    add(
        "--without",
        action="append",
        default=[],
        metavar="ID",
        help="a request does not arrive",
    )
    add_draft_options(add)
    add("--spare", default="", metavar="ID", help="a request is not preempted in turn N")
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="of steps, as minfer simulate --fit writes it "
        "(default: fitted to this journal)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the fork as a journal, to be viewed",
    )


def change_of(
    journal: Journal, options: argparse.Namespace, cost: CostModel = H200
) -> Change:
    """The changes of the options; numbers of drafts are those that pay by the costs of
    steps. Raises ConfigError for an unknown policy, and for impossible drafts.
    """
    settings: dict[str, Any] = {
        name: value for name in SIZES if (value := getattr(options, name)) is not None
    }
    config = journal.config
    if "num_blocks" in settings:  # of which the same share is kept free
        settings["watermark"] = (
            config.watermark * settings["num_blocks"] // config.num_blocks
        )
    sized = with_block_size(config, settings.get("block_size", config.block_size))
    sized = with_blocks(sized, settings.get("num_blocks", config.num_blocks))
    tiers = {"host": sized.host, "external_store": sized.external_store}
    settings |= {
        name: tier for name, tier in tiers.items() if tier != getattr(config, name)
    }
    if options.scheduling_policy:
        settings["policy"] = policy_named(options.scheduling_policy)
    speculation = _speculation(journal.config, options, cost)
    if speculation != journal.config.speculation:
        settings["speculation"] = speculation
    return Change(
        settings=settings,
        without=tuple(options.without),
        spare=options.spare,
        acceptance=options.acceptance_rate,
    )


def _speculation(
    config: EngineConfig, options: argparse.Namespace, cost: CostModel
) -> Speculation | None:
    """The speculation of a fork."""
    drafts, method = options.num_speculative_tokens, options.speculative_method
    if drafts is None and method is None:
        return config.speculation
    if drafts is None:
        if config.speculation is None:
            raise ConfigError(DRAFTS_NEEDED)
        drafts = config.speculation.drafts
    return with_drafts(config, drafts, method, cost).speculation


def print_fork(journal: Journal, options: argparse.Namespace) -> int:
    """Fork a run and print the results; returns the exit code."""
    fork_turn = journal.count if options.at is None else options.at
    strict = options.strict_policy
    recorded = Report(
        journal.config, overrides=counts_of(journal.config.policy, strict=strict)
    )
    cost = with_draft_cost(options, _step_cost(journal, options, recorded, fork_turn))
    change = change_of(journal, options, cost)
    results = {"recorded": recorded.figures()}
    warn_of_overrides("recorded", journal.config.policy, recorded.overrides)
    with without_python_warnings():
        unchanged = fork(journal, fork_turn, Change(), cost)
        report = _fork_report(unchanged, recorded.begin, strict=strict)
        results["unchanged"] = report.figures()
        changed = fork(journal, fork_turn, change, cost)
        # With --spare, the changed turn is not one that the engine decides by itself.
        skip = 1 if change.spare else 0
        report = _fork_report(changed, recorded.begin, options.save, skip, strict=strict)
        results["changed"] = report.figures()
    warn_of_overrides("changed", changed.config.policy, report.overrides)
    if options.json:
        handed = len(changed.resumed)
        print(
            json.dumps(
                {"turn": fork_turn, "handed_over": handed, "cost": cost.name, **results}
            )
        )
    else:
        print("\n".join(_render(fork_turn, cost, changed, results)))
    return 0


def _step_cost(
    journal: Journal, options: argparse.Namespace, recorded: Report, first_turn: int
) -> CostModel:
    """The costs of steps; `recorded` reports the turns from `first_turn` on meanwhile."""
    turns = _report_from(journal.turns(), recorded, first_turn)
    if options.cost is not None:
        cost = read_cost(options.cost)
        deque(turns, maxlen=0)
        return cost
    try:
        cost, _ = fit(measured_steps(turns), "fitted to this journal")
    except ConfigError:  # too few steps
        return H200
    return cost


def _report_from(
    turns: Iterable[Turn], report: Report, first_turn: int
) -> Iterator[Turn]:
    """Pass all turns on; `report` gets those from `first_turn` on."""
    for turn in turns:
        if turn.number >= first_turn:
            report.fold(turn)
        yield turn


def _fork_report(
    forked: Fork,
    begin: float,
    save: Path | None = None,
    skip: int = 0,
    *,
    strict: bool = False,
) -> Report:
    """The report of a fork that begins at a time; its turns but the first `skip` are
    saved, if a file is named. Raises PolicyOverrideError, if it is strict.
    """
    report = Report(
        forked.config, overrides=counts_of(forked.config.policy, strict=strict)
    )
    for since, request in forked.resumed:  # they have waited, and may have had tokens
        report.note_arrival(request.id, since)
        if request.output:
            report.last[request.id, 0] = begin
    turns = report.fold_turns(forked.turns)
    if save:
        write_journal(save, forked.config, islice(turns, skip, None))
    deque(turns, maxlen=0)
    return report


def _render(
    fork_turn: int, cost: CostModel, changed: Fork, results: dict[str, Figures]
) -> Iterator[str]:
    """The figures side by side, and how reliable they are."""
    yield (
        f"From turn {fork_turn} on, in seconds: as recorded; then unchanged, and "
        "changed, as modelled."
    )
    yield summary_line("", "".join(f"{name:>14}" for name in results))
    for label, path in _FIGURES.items():
        cells = [reduce(getitem, path, figures) for figures in results.values()]
        if label in _OF_DRAFTS and not any(cells):
            continue
        yield summary_line(label, "".join(map(_cell, cells)))
    yield (
        "\nExact: turns before the fork, arrivals, cancels, lengths of what ended at a "
        "stop token or its limit."
    )
    yield (
        f"Modelled: durations of steps ({cost.name}), token values, so hits on outputs; "
        "samples that had not ended write as much as they may."
    )
    if changed.config.speculation is not None:
        recorded_drafts = bool(results["recorded"]["drafted"]["rows"])
        yield (
            _drafts_line(changed.guesses, recorded_drafts)
            + free_draft_remark(changed.config.speculation, cost)
            + "."
        )
    if changed.resumed:
        count = len(changed.resumed)
        yield f"Handed over to a new engine with an empty cache: {count} requests."


def _drafts_line(guesses: Guesses, recorded_drafts: bool) -> str:
    """Which results of drafts are known, and which are not."""
    exact = "nothing, as the run had none"
    if recorded_drafts:
        exact = "those at positions with a recorded result"
    return (
        f"Drafts: exact: {exact}; modelled: others are accepted with probability "
        f"{guesses.rate:.2g}, or that of their sample, if those before them are"
    )


def _cell(value: Any) -> str:
    return f"{'-':>14}" if value is None else f"{value:14,.4g}"
