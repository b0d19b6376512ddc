"""The replay of one run of an engine, and the lines that are printed about it."""

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from attrs import asdict

from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.policy_overrides import counts_of, warn_of_overrides
from minfer.effects.runs.replay_state import summary_line
from minfer.effects.runs.report import Report
from minfer.journal.replay import DivergenceError, Journal
from minfer.journal.turns import EngineRaisedError

Results = dict[str, Any]
DIVERGED: Final = 1  # exit code: a decision is not the recorded one
RAISED: Final = 3  # exit code: the engine raised


def code_of(results: Results) -> int:
    """The exit code of a run's results."""
    if results["raised"]:
        return RAISED
    return DIVERGED if results["divergence"] else 0


def verify_run(
    journal: Journal, name: str, end_turn: int | None = None, *, strict: bool = False
) -> Results:
    """Replay a run, or its turns before turn `end_turn`; returns the results, as JSON has
    them. A divergence, and an error of the engine, are results and not raised.

    Overrides of the policy are counted, and a warning about the run `name`; with
    `strict`, the first raises PolicyOverrideError.
    """
    report = Report(
        journal.config, overrides=counts_of(journal.config.policy, strict=strict)
    )
    divergence = raised = None
    begin = time.perf_counter()
    with paused_collector():
        try:
            deque(report.fold_turns(journal.turns(until=end_turn)), maxlen=0)
        except DivergenceError as error:
            divergence = asdict(error.divergence)
        except EngineRaisedError as error:
            names = ("turn", "time", "error", "where")
            raised = {name: getattr(error, name) for name in names}
    took = time.perf_counter() - begin
    warn_of_overrides(name, journal.config.policy, report.overrides)
    return {
        "run": name,
        "about": dict(journal.about),
        "segments": [segment.name for segment in journal.segments],
        "turns": journal.count,
        "row_results": journal.results,
        "digest": journal.digest.hex(),
        "state_digests": journal.checked,
        "closed": journal.closed,
        "torn": journal.torn,
        "divergence": divergence,
        "raised": raised,
        "replay_seconds": took,
        "row_results_per_second": journal.results / took,
        **report.figures(),
    }


def summary(results: Results) -> Iterator[str]:
    """The results of `verify_run` as lines of text."""
    yield from _run_lines(results)
    if results["raised"]:
        yield from raised_lines(results["raised"])
    elif results["divergence"]:
        yield from divergence_lines(results["divergence"])
    else:
        yield from _verified_lines(results)


def _run_lines(results: Results) -> Iterator[str]:
    """The run, and its figures."""
    run_info = results["about"]
    yield summary_line(
        "run",
        f"{results['run']}: {run_info.get('model', '?')} on "
        f"{run_info.get('device', '?')}, minfer {run_info.get('minfer', '?')}, "
        f"{len(results['segments'])} segments",
    )
    yield summary_line(
        "replayed",
        f"{results['turns']:,} turns, {results['steps']:,.0f} steps, "
        f"{results['row_results']:,} row-results in {results['replay_seconds']:.1f} s "
        f"({results['row_results_per_second']:,.0f} a second)",
    )
    ends = ", ".join(
        f"{count:,} {reason}" for reason, count in sorted(results["ended"].items())
    )
    yield summary_line(
        "samples",
        f"{results['samples']:,} ended ({ends or 'none'}); "
        f"{results['preemptions']:,.0f} preemptions",
    )
    if results["hit_share"] is not None:
        yield summary_line(
            "prefixes", f"{results['hit_share']:.1%} of prompt tokens were cached"
        )
    if overrides := results["overrides"]["first"]:
        count, number = results["overrides"]["count"], overrides["turn"]
        yield summary_line(
            "overrides",
            f"{count:,} answers of the policy could not be used, the first in turn "
            f"{number:,}: {overrides['method']} {overrides['why']}",
        )
    if (drafts := results["drafted"])["rows"]:
        yield summary_line(
            "drafts",
            f"{drafts['accepted']:,} of {drafts['proposed']:,} accepted "
            f"({drafts['rate']:.1%}); {drafts['length']:.2f} tokens of a row with some",
        )
    for name in ("ttft", "tpot", "itl"):
        spread = results[name].items()
        percentiles = [f"{q} {s * 1000:,.1f} ms" for q, s in spread if s is not None]
        if percentiles:
            yield summary_line(name.upper(), ", ".join(percentiles))


def raised_lines(error: Results) -> Iterator[str]:
    """The turn in which the engine raised, and where in the code."""
    yield summary_line(
        "RAISED", f"turn {error['turn']}: the engine raised {error['error']}"
    )
    yield summary_line("  in", error["where"])


def divergence_lines(divergence: Results) -> Iterator[str]:
    """The first turn whose decision is not the recorded one, and the difference."""
    yield summary_line(
        "DIVERGED",
        f"in turn {divergence['turn']} (step {divergence['step']}, "
        f"{divergence['time']:.6f} s); then: as recorded, now: as this engine decides",
    )
    yield from (f"  {difference['words']}" for difference in divergence["differences"])
    yield summary_line("  field", divergence["field"])
    if divergence["legend"]:
        yield summary_line("  columns", divergence["legend"])
    yield summary_line("  then", json.dumps(divergence["expected"]))
    yield summary_line("  now", json.dumps(divergence["found"]))


def _verified_lines(results: Results) -> Iterator[str]:
    """What was verified, and how the journal ends."""
    states = f"{results['state_digests']} digests of whole states"
    yield summary_line(
        "verified", f"every decision; digest {results['digest']}, and {states}"
    )
    end = "the journal stops while the engine ran"
    if results["closed"]:
        end = "the engine was closed"
    yield summary_line("end", "; ".join([end, *results["torn"]]))
