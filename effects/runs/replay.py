"""`minfer replay`: a journal folded through the engine, every decision verified; states
and forks.

Imports no torch.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from minfer.config import SIZES, ConfigError
from minfer.effects.live.driver import quiet_collector
from minfer.effects.live.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import H200, fit, read_cost, steps
from minfer.effects.runs.report import Report
from minfer.policies import policy_named
from minfer.runs.codec import dump
from minfer.runs.fork import Change, fork
from minfer.runs.replay import DivergenceError, Journal
from minfer.runs.turns import EngineRaisedError
from minfer.sequence import Sequence
from minfer.state import Turn

_MANY: Final = 20  # sequences that are listed
_DIVERGED: Final = 1  # exit codes
_RAISED: Final = 3
_CODES: Final = (
    "exit codes: 0 every decision is the recorded one; 1 one is not (--json: see its "
    '"divergence"); 2 the arguments or the journal cannot be used; 3 the engine raised '
    '("raised").'
)


def replay_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer replay` takes."""
    parser.epilog = _CODES
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="a journal, or a folder: the latest run in it",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    add("--until", type=int, metavar="N", help="replay the turns before turn N only")
    add("--at", type=int, metavar="N", help="show the state before turn N, or fork there")
    group = parser.add_argument_group(
        "fork",
        "change one thing at turn N (default: the first) and go on with modelled steps",
    )
    add = group.add_argument
    add(
        "--policy", metavar="NAME", help="another policy, named as in --scheduling-policy"
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


def replay(options: argparse.Namespace) -> int:
    """Replay, show a state, or fork; returns the exit code."""
    journal = read_journal(options.file)
    change = _change(journal, options)
    forks, shows = change != Change(), options.at is not None
    for name, fits in (
        ("until", not forks and not shows),
        ("cost", forks),
        ("save", forks),
    ):
        if getattr(options, name) is not None and not fits:
            what = "a replay of all turns before it" if name == "until" else "a fork"
            raise ConfigError(f"--{name} is of {what}; leave it out")
    if change.spare and (change.settings or change.without):
        raise ConfigError(
            "--spare changes one turn of the run as it was: leave other changes out"
        )
    if forks:
        return _fork(journal, options, change)
    if options.at is not None:
        for _ in journal.turns(until=options.at):
            pass
        show = json.dumps(dump(journal.state)) if options.json else _state(journal)
        print(show)
        return 0
    return _verify(journal, options)


def _verify(journal: Journal, options: argparse.Namespace) -> int:
    report, begin = Report(journal.config), time.perf_counter()
    divergence = raised = None
    with quiet_collector():
        try:
            deque(report.seen(journal.turns(until=options.until)), maxlen=0)
        except DivergenceError as error:
            divergence = error.divergence
        except EngineRaisedError as error:
            raised = error
    took = time.perf_counter() - begin
    found = {
        "about": dict(journal.about),
        "segments": [one.name for one in journal.segments],
        "turns": journal.count,
        "row_results": journal.results,
        "digest": journal.digest.hex(),
        "state_digests": journal.checked,
        "by_decisions_alone": journal.by_decisions_alone,
        "closed": journal.closed,
        "torn": journal.torn,
        "divergence": None if divergence is None else asdict(divergence),
        "raised": None
        if raised is None
        else {name: getattr(raised, name) for name in ("turn", "time", "error", "where")},
        "replay_seconds": took,
        "row_results_per_second": journal.results / took,
        **report.figures(),
    }
    print(json.dumps(found) if options.json else "\n".join(_summary(found)))
    return _RAISED if raised else _DIVERGED if divergence else 0


def _summary(found: dict[str, Any]) -> Iterable[str]:
    """What was found, in lines."""
    about = found["about"]
    yield _line(
        "run",
        f"{about.get('model', '?')} on {about.get('device', '?')}, minfer "
        f"{about.get('minfer', '?')}, {len(found['segments'])} segments",
    )
    yield _line(
        "replayed",
        f"{found['turns']:,} turns, {found['steps']:,.0f} steps, "
        f"{found['row_results']:,} row-results in {found['replay_seconds']:.1f} s "
        f"({found['row_results_per_second']:,.0f} a second)",
    )
    ends = ", ".join(f"{count:,} {why}" for why, count in sorted(found["ended"].items()))
    yield _line(
        "samples",
        f"{found['samples']:,} ended ({ends or 'none'}); "
        f"{found['preemptions']:,.0f} preemptions",
    )
    if found["hit_share"] is not None:
        yield _line("prefixes", f"{found['hit_share']:.1%} of prompt tokens were cached")
    for name in ("ttft", "tpot", "itl"):
        parts = [
            f"{q} {s * 1000:,.1f} ms" for q, s in found[name].items() if s is not None
        ]
        yield from [_line(name.upper(), ", ".join(parts))] if parts else ()
    if one := found["raised"]:
        yield _line("RAISED", f"turn {one['turn']}: the engine raised {one['error']}")
        yield _line("  in", one["where"])
        return
    if one := found["divergence"]:
        yield _line(
            "DIVERGED",
            f"in turn {one['turn']} (step {one['step']}, {one['time']:.6f} s); "
            "then: as recorded, now: as this engine decides",
        )
        yield from (f"  {difference['words']}" for difference in one["differences"])
        yield _line("  field", one["field"])
        yield from [_line("  columns", one["legend"])] if one["legend"] else ()
        yield _line("  then", json.dumps(one["expected"]))
        yield _line("  now", json.dumps(one["found"]))
        return
    states = f"{found['state_digests']} digests of whole states"
    if found["by_decisions_alone"]:
        states = (
            "no states: this journal is of an older format, replayed by its decisions"
        )
    yield _line("verified", f"every decision; digest {found['digest']}, and {states}")
    end = (
        "the engine was closed"
        if found["closed"]
        else "the journal stops while the engine ran"
    )
    yield _line("end", "; ".join([end, *found["torn"]]))


def _line(name: str, text: str) -> str:
    return f"{name:<11}{text}"


# --- a state ----------------------------------------------------------------------------


def _state(journal: Journal) -> str:
    """The state that a replay has reached, for people."""
    state, config, pool = journal.state, journal.config, journal.state.blocks
    private = config.num_blocks - pool.free - pool.idle - pool.live
    lines = [
        _line("state", f"before turn {journal.count}, at {state.time:.6f} s"),
        _line(
            "blocks",
            f"{pool.free} free, {pool.idle} cached, {pool.live} "
            f"published and in use, {private} private, of {config.num_blocks}",
        ),
        _line(
            "in flight",
            ", ".join(
                f"step {p.step} ({len(p.gens)} rows, {sum(p.counts)} tokens)"
                for p in state.inflight
            )
            or "nothing",
        ),
        _line("policy", f"{config.policy}, its state {state.policy}"),
    ]
    if state.held and state.waiting:
        lines.append(_line("held", f"the first in line waits for {state.held.cause}"))
    run = state.running
    lines.append(_line("running", f"{len(run)} sequences, in rank order"))
    for i, seq in enumerate(run.seqs[:_MANY]):
        filled = " (its prompt)" * (run.sched[i] < run.base[i])
        lines.append(
            f"  {_name(seq)}: row {run.rows[i]}, knows {run.known[i]} of up to "
            f"{run.last[i] + 1} tokens, planned to {run.sched[i]}{filled}, "
            f"{len(run.tables[i])} blocks, {run.chains[i].sealed} published"
        )
    lines.append(_line("waiting", f"{len(state.waiting)} sequences, first in line first"))
    for seq in islice(state.waiting, _MANY):
        again = f", preempted {seq.preempted} times" * bool(seq.preempted)
        since = f"since {seq.arrived:.6f} s, {len(seq.history)} tokens"
        lines.append(f"  {_name(seq)}: {since}{again}")
    return "\n".join(lines)


def _name(seq: Sequence) -> str:
    return f"{seq.request.id!r}" + f" sample {seq.sample}" * (seq.request.n > 1)


# --- forks ------------------------------------------------------------------------------

_FIGURES: Final = {
    "tokens/s": ("tokens_per_second",),
    "TTFT p50": ("ttft", "p50"),
    "TTFT p99": ("ttft", "p99"),
    "TPOT p50": ("tpot", "p50"),
    "TPOT p99": ("tpot", "p99"),
    "ITL p99": ("itl", "p99"),
    "preemptions": ("preemptions",),
    "cached": ("hit_share",),
    "seconds": ("seconds",),
    "refused": ("ended", "rejected"),
}


def _change(journal: Journal, options: argparse.Namespace) -> Change:
    """What the options ask to change. Raises ConfigError for an unknown policy."""
    settings = {
        name: value for name in SIZES if (value := getattr(options, name)) is not None
    }
    if "num_blocks" in settings:  # of which the same share is left free
        was = journal.config
        settings["watermark"] = was.watermark * settings["num_blocks"] // was.num_blocks
    if options.policy:
        settings["policy"] = policy_named(options.policy)
    return Change(settings=settings, without=tuple(options.without), spare=options.spare)


def _fork(journal: Journal, options: argparse.Namespace, change: Change) -> int:
    at = journal.count if options.at is None else options.at
    cost, report = (
        read_cost(options.cost) if options.cost else None,
        Report(journal.config),
    )
    turns = _seen(journal.turns(), report, at)
    if cost is None:
        try:
            cost, _ = fit(steps(turns), "fitted to this journal")
        except ConfigError:  # too few steps
            cost = H200
    deque(turns, maxlen=0)
    found, handed, begin = {"recorded": report.figures()}, 0, report.begin
    for name, what in (("unchanged", Change()), ("changed", change)):
        made = fork(journal, at, what, cost)
        report, handed = Report(made.config), len(made.handed)
        for since, request in made.handed:  # they have waited, and may have had tokens
            report.arrives(request.id, since)
            if request.output:
                report.last[request.id, 0] = begin
        turns = report.seen(made.turns)
        if name == "changed" and options.save:
            # A turn that spares somebody is not what the engine decides by itself.
            write_journal(
                options.save, made.config, islice(turns, bool(change.spare), None)
            )
        deque(turns, maxlen=0)
        found[name] = report.figures()
    if options.json:
        print(json.dumps({"turn": at, "handed_over": handed, "cost": cost.name, **found}))
        return 0
    print(
        f"From turn {at} on, in seconds: as recorded; then unchanged, and changed, as "
        f"modelled."
    )
    print(_line("", "".join(f"{name:>14}" for name in found)))
    for label, path in _FIGURES.items():
        cells = [reduce(getitem, path, figures) for figures in found.values()]
        print(
            _line(
                label,
                "".join("-".rjust(14) if c is None else f"{c:14,.4g}" for c in cells),
            )
        )
    print(
        "\nExact: turns before the fork, arrivals, cancels, lengths of what ended at a "
        "stop "
        "token or its limit."
    )
    print(
        f"Modelled: durations of steps ({cost.name}), token values, so hits on outputs; "
        f"who had "
        "not ended writes as much as it may."
    )
    if handed:
        print(f"Handed over to a new engine with an empty cache: {handed} requests.")
    return 0


def _seen(turns: Iterable[Turn], report: Report, at: int) -> Iterator[Turn]:
    """Pass all turns on; the report is of those from `at` on."""
    for turn in turns:
        if turn.number >= at:
            report.see(turn)
        yield turn
