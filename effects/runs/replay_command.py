"""`minfer replay`: runs a journal through the engine again, and verifies every decision;
or shows a state (`replay_state`), or makes a fork (`replay_fork`).

Imports no torch.
"""

import argparse
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from minfer.effects.live.journal.journal_files import RunFiles, replica_runs_in, runs_in
from minfer.effects.live.journal.routing_journal_file import routing_journals
from minfer.effects.runs.policy_overrides import strict_option
from minfer.effects.runs.recorded import latest_of, read_each
from minfer.effects.runs.replay_fork import change_of, fork_options, print_fork
from minfer.effects.runs.replay_routing import replay_routing
from minfer.effects.runs.replay_run import Results, code_of, summary, verify_run
from minfer.effects.runs.replay_server import replay_server
from minfer.effects.runs.replay_state import render_state
from minfer.journal.codec import dump
from minfer.simulation.fork import Change
from minfer.values.checks import ConfigError

_CODES: Final = (
    "exit codes: 0 every decision is the recorded one; 1 one is not (--json: see its "
    '"divergence"), or journals of a server do not agree ("agreement"); 2 the arguments '
    'or the journal cannot be used; 3 the engine raised ("raised"). Of several runs the '
    "highest."
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
        "but --json the latest; or the journal of a router, FILE.routing; of a folder "
        "with replica-0 and so on, all replicas and routers, and whether they agree",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    add("--until", type=int, metavar="N", help="replay the turns before turn N only")
    add("--at", type=int, metavar="N", help="show the state before turn N, or fork there")
    strict_option(parser)
    fork_options(parser)


def replay(options: argparse.Namespace) -> int:
    """Replay, show a state, or fork; returns the exit code. Raises JournalError and
    PolicyOverrideError.
    """
    if replica_runs_in(options.file):
        return replay_server(options.file, options)
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
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not forks:
            raise ConfigError(f"--{name} is of a fork; leave it out")
    other_changes = change.settings or change.without or change.acceptance is not None
    if change.spare and other_changes:
        raise ConfigError(
            "--spare changes one turn of the run as it was: leave other changes out"
        )


def _verify(runs: Sequence[RunFiles], options: argparse.Namespace) -> int:
    """Replay runs, print the results, and return the exit code."""

    def verify(run: RunFiles) -> Results:
        strict = options.strict_policy
        results = verify_run(run.open(), run.name, options.until, strict=strict)
        if not options.json:
            separator = "" if run is runs[0] else "\n"
            print(separator + "\n".join(summary(results)), flush=True)
        return results

    results, code = read_each(runs, verify)
    if options.json:
        *earlier, last = results
        print(json.dumps({**last, "others": earlier}))
    return max(code, *map(code_of, results))
