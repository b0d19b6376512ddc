"""The choice of a simulation's cost model, with its reason.

    --cost FILE    that of a file, or with `--cost h200` the built-in model
    --fit JOURNAL  fitted to the steps of that run
    neither        fitted to the trace itself, if it is a run with enough steps; else the
                   built-in model, of another model and GPU than the reader's

The output names the model: else a reader would take a 7B model on an H200 for the model
that was served.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import (
    H200,
    MIN_STEPS,
    fit,
    measured_steps,
    read_cost,
    write_cost,
)
from minfer.simulation.cost import CostModel
from minfer.values.checks import ConfigError

BUILT_IN: Final = "h200"  # the name of the built-in model for `--cost`
_OTHERS: Final = "--fit JOURNAL takes the costs of a run of yours, --cost FILE of a file"


@frozen
class ChosenCost:
    """A cost model, its origin, and its known errors."""

    model: CostModel
    reason: str
    details: dict[str, Any]


def choose_cost(options: argparse.Namespace, trace: ArrivalTrace) -> ChosenCost:
    """The cost model of the options, or else of the trace; stored, if that is requested.
    Raises ConfigError and JournalError.
    """
    if options.cost is not None and options.fit is not None:
        raise ConfigError(
            "--cost and --fit both say what steps cost: leave one of them out"
        )
    chosen = _choose(options, trace)
    if options.save_cost is not None:
        write_cost(options.save_cost, chosen.model, chosen.details)
    return chosen


def _choose(options: argparse.Namespace, trace: ArrivalTrace) -> ChosenCost:
    if str(options.cost) == BUILT_IN:
        return ChosenCost(H200, f"as --cost {BUILT_IN} says", {})
    if options.cost is not None:
        return ChosenCost(
            read_cost(options.cost), f"read from {options.cost} (--cost)", {}
        )
    if options.fit is not None:
        return _fit_run(options.fit, "as --fit says")
    if trace.config is None:
        return ChosenCost(H200, f"the trace does not say; {_OTHERS}", {})
    try:
        return _fit_run(
            Path(options.trace), f"--cost {BUILT_IN} takes the built-in model"
        )
    except ConfigError:  # it may be half a minute long: a simulation is still possible
        too_few = f"the run has fewer than the {MIN_STEPS} steps that a cost model needs"
        elsewhere = _other_device(Path(options.trace))
        return ChosenCost(H200, f"{too_few}{elsewhere}; {_OTHERS}", {})


def _other_device(path: Path) -> str:
    """A remark that the built-in model is of another device than a run's, if so."""
    device = str(dict(read_journal(path).about).get("device", ""))
    if not device or BUILT_IN in device.lower():
        return ""
    return f", and ran on {device}: these are not the times of that device"


def _fit_run(path: Path, remark: str) -> ChosenCost:
    journal = read_journal(path)
    ran = dict(journal.about)
    model, errors = fit(measured_steps(journal.turns()), f"fitted to {path}")
    ran_with = [str(ran[name]) for name in ("model", "device", "executor") if name in ran]
    reason = f"what ran there: {', '.join(ran_with)}; {remark}" if ran_with else remark
    return ChosenCost(model, reason, {**errors, "ran": ran})
