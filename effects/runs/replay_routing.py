"""`minfer replay` of a router's journals: every decision verified."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from minfer.effects.live.journal.journal_files import content_of
from minfer.effects.runs.replay_run import DIVERGED
from minfer.effects.runs.replay_state import summary_line
from minfer.journal.format import JournalError
from minfer.journal.routed_requests import RoutedRequests
from minfer.journal.routing_journal import (
    RoutingDivergenceError,
    RoutingJournal,
    RoutingTurn,
)
from minfer.routing.messages import Deferred, NoReplica, Placed
from minfer.values.checks import ConfigError

_ROUTER_OPTIONS: Final = frozenset(
    {"file", "json"}
)  # options that hold for a router's journal
_PARSERS: Final = frozenset({"run", "policies"})  # what argparse adds


def replay_routing(files: Sequence[Path], options: argparse.Namespace) -> int:
    """Replay journals, print the results, and return the exit code. Raises JournalError
    and ConfigError.
    """
    refuse_options(options, "is for an engine's journal; this is a router's")
    results = [verify_router(file) for file in files]
    if options.json:
        *earlier, last = results
        print(json.dumps({**last, "others": earlier}))
    else:
        print("\n\n".join("\n".join(_lines(result)) for result in results))
    return DIVERGED if any(result["divergence"] for result in results) else 0


def refuse_options(options: argparse.Namespace, reason: str) -> None:
    """Raise ConfigError for an option that is for an engine's journal."""
    for name, value in vars(options).items():
        if name not in _ROUTER_OPTIONS | _PARSERS and value not in (None, False, "", []):
            raise ConfigError(f"--{name.replace('_', '-')} {reason}: leave it out")


def verify_router(file: Path, requests: RoutedRequests | None = None) -> dict[str, Any]:
    """Replay a journal; returns the results, and adds its requests to `requests`. Raises
    JournalError.
    """
    data = bytes(content_of(file))
    counts, whys = Counter[str](), Counter[str]()
    divergence = None
    begin = time.perf_counter()
    try:
        journal = RoutingJournal(data)
        for turn in journal.turns():
            _count(turn, counts, whys)
            if requests is not None:
                requests.turn(turn)
    except RoutingDivergenceError as error:
        names = ("turn", "field", "expected", "found")
        divergence = {name: getattr(error, name) for name in names}
    except JournalError as error:
        raise JournalError(f"{file}: {error}") from None
    return {
        "run": file.stem,
        "about": dict(journal.about),
        "policy": type(journal.config.policy).__name__,
        "turns": journal.count,
        **{name: counts[name] for name in ("placed", "deferred", "no_replica")},
        "why": dict(whys),
        "blocks": counts["blocks"],
        "hit_blocks": counts["hit"],
        "closed": journal.closed,
        "torn": journal.torn,
        "divergence": divergence,
        "replay_seconds": time.perf_counter() - begin,
    }


def _count(turn: RoutingTurn, counts: Counter[str], whys: Counter[str]) -> None:
    """Count the decision of a turn, if it is one."""
    match getattr(turn.result, "reason", None):
        case Placed() as placed:
            whys[placed.override or placed.why] += 1
            counts.update(placed=1, blocks=placed.blocks, hit=placed.hit)
        case Deferred():
            counts["deferred"] += 1
        case NoReplica():
            counts["no_replica"] += 1


def _lines(results: dict[str, Any]) -> Iterator[str]:
    """The results, in lines."""
    version = results["about"].get("minfer", "?")
    yield summary_line(
        "router", f"{results['run']}: policy {results['policy']}, minfer {version}"
    )
    took = results["replay_seconds"]
    yield summary_line("replayed", f"{results['turns']:,} turns in {took:.1f} s")
    whys = ", ".join(
        f"{count:,} by {reason}" for reason, count in sorted(results["why"].items())
    )
    yield summary_line(
        "requests",
        f"{results['placed']:,} placed ({whys or 'none'}), {results['deferred']:,} "
        f"deferred, {results['no_replica']:,} without a replica",
    )
    if results["blocks"]:
        share = results["hit_blocks"] / results["blocks"]
        yield summary_line("prefixes", f"{share:.1%} of blocks were expected in a cache")
    if results["divergence"]:
        yield from divergence_lines(results["divergence"])
    else:
        yield summary_line("verified", "every decision")
    if results["torn"]:
        yield summary_line("end", f"a last line of {results['torn']} bytes is cut off")


def divergence_lines(divergence: dict[str, Any]) -> Iterator[str]:
    """The turn in which the router decides otherwise, and the difference."""
    yield summary_line("DIVERGED", f"in turn {divergence['turn']}")
    yield summary_line("  field", divergence["field"])
    yield summary_line("  then", json.dumps(divergence["expected"]))
    yield summary_line("  now", json.dumps(divergence["found"]))
