"""`minfer replay FILE.routing`: the journal of a front's router, every decision verified.

Imports no torch.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from minfer.effects.live.journal.routing_writer import SUFFIX
from minfer.effects.runs.replay_state import summary_line
from minfer.routing.messages import Placed
from minfer.routing.router import Routed
from minfer.runs.journal import JournalError
from minfer.runs.routing_journal import RoutingDivergenceError, RoutingJournal

_DIVERGED: Final = 1  # exit code


def is_routing_journal(path: Path) -> bool:
    """Returns whether a file is the journal of a router, by its name."""
    return path.suffix == SUFFIX


def replay_routing(options: argparse.Namespace) -> int:
    """Replay a router, and print the results; returns the exit code. Raises
    JournalError.
    """
    path: Path = options.file
    try:
        journal = RoutingJournal(path.read_bytes())
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
    placed = Counter[tuple[str, str]]()
    waited, divergence, begin = 0, None, time.perf_counter()
    try:
        for turn in journal.turns():
            if isinstance(turn.result, Routed):
                reason = turn.result.reason
                if isinstance(reason, Placed):
                    placed[reason.replica, reason.why] += 1
                else:
                    waited += 1
    except RoutingDivergenceError as error:
        divergence = {
            "turn": error.turn,
            "field": error.field,
            "expected": error.expected,
            "found": error.found,
        }
    found = {
        "about": dict(journal.about),
        "policy": type(journal.config.policy).__name__,
        "turns": journal.count,
        "placed": [
            {"replica": name, "why": why, "requests": count}
            for (name, why), count in sorted(placed.items())
        ],
        "waited": waited,
        "torn": journal.torn,
        "divergence": divergence,
        "replay_seconds": time.perf_counter() - begin,
    }
    print(json.dumps(found) if options.json else "\n".join(_lines(path, found)))
    return _DIVERGED if divergence else 0


def _lines(path: Path, found: dict[str, Any]) -> list[str]:
    """The results, in lines."""
    about = found["about"]
    lines = [
        summary_line(
            "router",
            f"{path.stem}: {found['policy']}, minfer {about.get('minfer', '?')}",
        ),
        summary_line(
            "replayed", f"{found['turns']:,} turns in {found['replay_seconds']:.1f} s"
        ),
    ]
    for one in found["placed"]:
        what = f"{one['requests']:,} requests ({one['why']})"
        lines.append(summary_line(f"replica {one['replica']}", what))
    if found["waited"]:
        lines.append(summary_line("waited", f"{found['waited']:,} times for a replica"))
    if (one := found["divergence"]) is None:
        return [*lines, summary_line("verified", "every decision")]
    lines.append(summary_line("DIVERGED", f"in turn {one['turn']}: {one['field']}"))
    lines.append(summary_line("  then", json.dumps(one["expected"])))
    return [*lines, summary_line("  now", json.dumps(one["found"]))]
