"""The replay of one run of an engine, and the lines that are printed about it."""

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from attrs import asdict

from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.replay_state import summary_line
from minfer.effects.runs.report import Report
from minfer.journal.replay import DivergenceError, Journal
from minfer.journal.turns import EngineRaisedError

Results = dict[str, Any]
DIVERGED: Final = 1  # exit code: a decision is not the recorded one
RAISED: Final = 3  # exit code: the engine raised


def code_of(found: Results) -> int:
    """The exit code of a run's results."""
    if found["raised"]:
        return RAISED
    return DIVERGED if found["divergence"] else 0


def verify_run(journal: Journal, until: int | None = None) -> Results:
    """Replay a run, or its turns before turn `until`; returns the results, as JSON has
    them. A divergence, and an error of the engine, are results and not raised.
    """
    report = Report(journal.config)
    divergence = raised = None
    begin = time.perf_counter()
    with paused_collector():
        try:
            deque(report.seen(journal.turns(until=until)), maxlen=0)
        except DivergenceError as error:
            divergence = asdict(error.divergence)
        except EngineRaisedError as error:
            names = ("turn", "time", "error", "where")
            raised = {name: getattr(error, name) for name in names}
    took = time.perf_counter() - begin
    return {
        "about": dict(journal.about),
        "segments": [one.name for one in journal.segments],
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


def summary(found: Results) -> Iterator[str]:
    """The results of `verify_run`, and `run`, the run's name, as lines of text."""
    yield from _run_lines(found)
    if found["raised"]:
        yield from raised_lines(found["raised"])
    elif found["divergence"]:
        yield from divergence_lines(found["divergence"])
    else:
        yield from _verified_lines(found)


def _run_lines(found: Results) -> Iterator[str]:
    """The run, and its figures."""
    about = found["about"]
    yield summary_line(
        "run",
        f"{found['run']}: {about.get('model', '?')} on {about.get('device', '?')}, "
        f"minfer {about.get('minfer', '?')}, {len(found['segments'])} segments",
    )
    yield summary_line(
        "replayed",
        f"{found['turns']:,} turns, {found['steps']:,.0f} steps, "
        f"{found['row_results']:,} row-results in {found['replay_seconds']:.1f} s "
        f"({found['row_results_per_second']:,.0f} a second)",
    )
    ends = ", ".join(f"{count:,} {why}" for why, count in sorted(found["ended"].items()))
    yield summary_line(
        "samples",
        f"{found['samples']:,} ended ({ends or 'none'}); "
        f"{found['preemptions']:,.0f} preemptions",
    )
    if found["hit_share"] is not None:
        yield summary_line(
            "prefixes", f"{found['hit_share']:.1%} of prompt tokens were cached"
        )
    if (drafts := found["drafted"])["rows"]:
        yield summary_line(
            "drafts",
            f"{drafts['accepted']:,} of {drafts['proposed']:,} accepted "
            f"({drafts['rate']:.1%}); {drafts['length']:.2f} tokens of a row with some",
        )
    for name in ("ttft", "tpot", "itl"):
        spread = found[name].items()
        parts = [f"{q} {s * 1000:,.1f} ms" for q, s in spread if s is not None]
        if parts:
            yield summary_line(name.upper(), ", ".join(parts))


def raised_lines(one: Results) -> Iterator[str]:
    """The turn in which the engine raised, and where in the code."""
    yield summary_line("RAISED", f"turn {one['turn']}: the engine raised {one['error']}")
    yield summary_line("  in", one["where"])


def divergence_lines(one: Results) -> Iterator[str]:
    """The first turn whose decision is not the recorded one, and the difference."""
    yield summary_line(
        "DIVERGED",
        f"in turn {one['turn']} (step {one['step']}, {one['time']:.6f} s); "
        "then: as recorded, now: as this engine decides",
    )
    yield from (f"  {difference['words']}" for difference in one["differences"])
    yield summary_line("  field", one["field"])
    if one["legend"]:
        yield summary_line("  columns", one["legend"])
    yield summary_line("  then", json.dumps(one["expected"]))
    yield summary_line("  now", json.dumps(one["found"]))


def _verified_lines(found: Results) -> Iterator[str]:
    """What was verified, and how the journal ends."""
    states = f"{found['state_digests']} digests of whole states"
    yield summary_line(
        "verified", f"every decision; digest {found['digest']}, and {states}"
    )
    end = "the journal stops while the engine ran"
    if found["closed"]:
        end = "the engine was closed"
    yield summary_line("end", "; ".join([end, *found["torn"]]))
