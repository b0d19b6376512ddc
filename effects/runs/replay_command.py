"""`minfer replay`: a journal folded through the engine, every decision verified; states
(`replay_state`) and forks (`replay_fork`).

Imports no torch.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.live.journal.journal_files import RunFiles, runs_in
from minfer.effects.live.journal.routing_journal_file import routing_journals
from minfer.effects.runs.recorded import latest_of, read_each
from minfer.effects.runs.replay_fork import change_of, fork_options, print_fork
from minfer.effects.runs.replay_routing import replay_routing
from minfer.effects.runs.replay_state import render_state, summary_line
from minfer.effects.runs.report import Report
from minfer.runs.codec import dump
from minfer.runs.fork import Change
from minfer.runs.replay import DivergenceError, Journal
from minfer.runs.turns import EngineRaisedError
from minfer.values.checks import ConfigError

Results = dict[str, Any]
_DIVERGED: Final = 1  # exit codes
_RAISED: Final = 3
_CODES: Final = (
    "exit codes: 0 every decision is the recorded one; 1 one is not (--json: see its "
    '"divergence"); 2 the arguments or the journal cannot be used; 3 the engine raised '
    '("raised"). Of several runs the highest.'
)


def replay_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer replay`."""
    parser.epilog = _CODES
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="a journal, or a folder: every run in it, or with one of the options below "
        "but --json the latest; or the journal of a router, FILE.routing",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    add("--until", type=int, metavar="N", help="replay the turns before turn N only")
    add("--at", type=int, metavar="N", help="show the state before turn N, or fork there")
    fork_options(parser)


def replay(options: argparse.Namespace) -> int:
    """Replay, show a state, or fork; returns the exit code. Raises JournalError."""
    if routed := routing_journals(options.file):
        return replay_routing(routed, options)
    runs = runs_in(options.file)
    journal = runs[-1].open()
    change = change_of(journal, options)
    _check_options(options, change)
    verifies = change == Change() and options.at is None
    if verifies and options.until is None:  # turns are counted in each run
        return _verify(runs, options)
    last = latest_of(options.file, runs)
    if verifies:
        return _verify([last], options)
    if change != Change():
        return print_fork(journal, options)
    deque(journal.turns(until=options.at), maxlen=0)
    print(json.dumps(dump(journal.state)) if options.json else render_state(journal))
    return 0


def _check_options(options: argparse.Namespace, change: Change) -> None:
    """Raise ConfigError for options that do not go together."""
    forks = change != Change()
    if options.until is not None and (forks or options.at is not None):
        raise ConfigError("--until is of a replay of all turns before it; leave it out")
    for name in ("cost", "save", "draft-cost"):
        given = getattr(options, name.replace("-", "_"))
        if given is not None and not forks:
            raise ConfigError(f"--{name} is of a fork; leave it out")
    others = change.settings or change.without or change.acceptance is not None
    if change.spare and others:
        raise ConfigError(
            "--spare changes one turn of the run as it was: leave other changes out"
        )


def _verify(runs: Sequence[RunFiles], options: argparse.Namespace) -> int:
    """Replay runs, print the results, and return the exit code."""

    def verify(run: RunFiles) -> Results:
        found = {"run": run.name, **_verify_run(run.open(), options.until)}
        if not options.json:
            separator = "" if run is runs[0] else "\n"
            print(separator + "\n".join(_summary(found)), flush=True)
        return found

    found, code = read_each(runs, verify)
    if options.json:
        *others, last = found
        print(json.dumps({**last, "others": others}))
    return max(code, *map(_code, found))


def _code(found: Results) -> int:
    """The exit code of a run's results."""
    if found["raised"]:
        return _RAISED
    return _DIVERGED if found["divergence"] else 0


def _verify_run(journal: Journal, until: int | None) -> Results:
    """Replay a run; returns the results."""
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
        "by_decisions_alone": journal.by_decisions_alone,
        "closed": journal.closed,
        "torn": journal.torn,
        "divergence": divergence,
        "raised": raised,
        "replay_seconds": took,
        "row_results_per_second": journal.results / took,
        **report.figures(),
    }


def _summary(found: Results) -> Iterator[str]:
    """The results, in lines."""
    yield from _run_lines(found)
    if found["raised"]:
        yield from _raised_lines(found["raised"])
    elif found["divergence"]:
        yield from _divergence_lines(found["divergence"])
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


def _raised_lines(one: Results) -> Iterator[str]:
    """The turn in which the engine raised, and the place."""
    yield summary_line("RAISED", f"turn {one['turn']}: the engine raised {one['error']}")
    yield summary_line("  in", one["where"])


def _divergence_lines(one: Results) -> Iterator[str]:
    """The turn in which the engine decides otherwise, and the difference."""
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
    """That all is equal, and how the journal ends."""
    states = f"{found['state_digests']} digests of whole states"
    if found["by_decisions_alone"]:
        states = (
            "no states: this journal is of an older format, replayed by its decisions"
        )
    yield summary_line(
        "verified", f"every decision; digest {found['digest']}, and {states}"
    )
    end = "the journal stops while the engine ran"
    if found["closed"]:
        end = "the engine was closed"
    yield summary_line("end", "; ".join([end, *found["torn"]]))
