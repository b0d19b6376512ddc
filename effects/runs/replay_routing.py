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

_OWN: Final = frozenset({"file", "json"})  # options that hold for a router's journal
_PARSERS: Final = frozenset({"run", "policies"})  # what argparse adds


def replay_routing(files: Sequence[Path], options: argparse.Namespace) -> int:
    """Replay journals, print the results, and return the exit code. Raises JournalError
    and ConfigError.
    """
    refuse_options(options, "is for an engine's journal; this is a router's")
    found = [verify_router(file) for file in files]
    if options.json:
        *others, last = found
        print(json.dumps({**last, "others": others}))
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in found))
    return DIVERGED if any(one["divergence"] for one in found) else 0


def refuse_options(options: argparse.Namespace, why: str) -> None:
    """Raise ConfigError for an option that is for an engine's journal."""
    for name, value in vars(options).items():
        if name not in _OWN | _PARSERS and value not in (None, False, "", []):
            raise ConfigError(f"--{name.replace('_', '-')} {why}: leave it out")


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


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The results, in lines."""
    version = found["about"].get("minfer", "?")
    yield summary_line(
        "router", f"{found['run']}: policy {found['policy']}, minfer {version}"
    )
    took = found["replay_seconds"]
    yield summary_line("replayed", f"{found['turns']:,} turns in {took:.1f} s")
    whys = ", ".join(f"{count:,} by {why}" for why, count in sorted(found["why"].items()))
    yield summary_line(
        "requests",
        f"{found['placed']:,} placed ({whys or 'none'}), {found['deferred']:,} "
        f"deferred, {found['no_replica']:,} without a replica",
    )
    if found["blocks"]:
        share = found["hit_blocks"] / found["blocks"]
        yield summary_line("prefixes", f"{share:.1%} of blocks were expected in a cache")
    if found["divergence"]:
        yield from divergence_lines(found["divergence"])
    else:
        yield summary_line("verified", "every decision")
    if found["torn"]:
        yield summary_line("end", f"a last line of {found['torn']} bytes is cut off")


def divergence_lines(one: dict[str, Any]) -> Iterator[str]:
    """The turn in which the router decides otherwise, and the difference."""
    yield summary_line("DIVERGED", f"in turn {one['turn']}")
    yield summary_line("  field", one["field"])
    yield summary_line("  then", json.dumps(one["expected"]))
    yield summary_line("  now", json.dumps(one["found"]))
