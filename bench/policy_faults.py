"""How often the kits find planted policies: one fault each, ten seeds, and sound ones.

`python -m bench.policy_faults` prints and writes, for each, in how many runs it was found
as what it is, by a short story that names the method, and in how many seconds.

The limit is of the CPU seconds of the processes that a kit starts, which a busy machine
does not change; seconds of wall time stand beside them. Policies that the result file has
are not tried again, unless `--again`: a run that was ended goes on. Each has the commit
with which it was tried.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from bench.results import circumstances, run, show, spread, write
from minfer.records.policy import FirstCome
from minfer.testing import PolicyError, RouterError, check_policy, check_router
from tests.kit.planted_policies import FAULTS, SOUND, Fault
from tests.kit.planted_routing import ROUTING_FAULTS

MAX_LINES: Final = 40  # of a story
MAX_CPU_SECONDS: Final = 60.0
_NOTHING: Final = Fault(FirstCome, (), "")


@frozen
class Attempt:
    """A run of a kit: the law that it found broken, and what it said."""

    seconds: float
    cpu_seconds: float
    law: str = ""
    method: str = ""
    lines: int = 0


def attempt_of(check: Callable[[], None]) -> Attempt:
    """Run a check, and time it."""
    begin, cpu_begin = time.perf_counter(), _cpu_seconds()
    law, method, lines = "", "", 0
    try:
        check()
    except (PolicyError, RouterError) as error:
        law, method, lines = error.law, error.method, str(error).count("\n") + 1
    seconds, cpu_seconds = time.perf_counter() - begin, _cpu_seconds() - cpu_begin
    return Attempt(seconds, cpu_seconds, law, method, lines)


def _cpu_seconds() -> float:
    """Of the kit's processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def figures(fault: Fault, attempts: list[Attempt]) -> dict[str, Any]:
    """How the attempts did; all is in time and short, or it says so."""
    found = [attempt for attempt in attempts if attempt.law]
    named = [
        attempt
        for attempt in found
        if attempt.law in fault.laws and attempt.method == fault.method
    ]
    return {
        "found": len(found),
        "as_what_it_is": len(named),
        "of": len(attempts),
        "seconds": spread([attempt.seconds for attempt in attempts]),
        "cpu_seconds": spread([attempt.cpu_seconds for attempt in attempts]),
        "lines": max((attempt.lines for attempt in found), default=0),
        "laws": sorted({attempt.law for attempt in found}),
        "methods": sorted({attempt.method for attempt in found}),
        "in_time": all(attempt.cpu_seconds <= MAX_CPU_SECONDS for attempt in attempts),
        "short": all(attempt.lines <= MAX_LINES for attempt in found),
        "attempts": [asdict(attempt) for attempt in attempts],
    }


def measure(args: argparse.Namespace) -> None:
    """Try each policy with each seed; write the results after each."""
    checks: dict[str, tuple[Fault, Callable[[int], None]]] = {}
    for name, fault in FAULTS.items():
        checks[name] = fault, _policy_check(fault.policy(), fault)
    for name, policy in SOUND.items():
        checks[f"sound: {name}"] = _NOTHING, _policy_check(policy, _NOTHING)
    for name, fault in ROUTING_FAULTS.items():
        checks[f"routing: {name}"] = fault, _router_check(fault.policy())
    path = args.folder / f"{args.name}.json"
    commit = circumstances(args.seed)["commit"]  # of the code that is loaded
    for name, (fault, check) in checks.items():
        if args.only not in name or (name in _stored(path) and not args.again):
            continue
        seeds = range(args.seed, args.seed + args.runs)
        attempts = [attempt_of(partial(check, seed)) for seed in seeds]
        result = {**figures(fault, attempts), "commit": commit}
        row = {key: value for key, value in result.items() if key != "attempts"}
        show({"policy": name, **row})
        # Read again: other calls may have tried other policies meanwhile.
        write(args.name, {**_stored(path), name: result}, args.seed, args.folder)


def _stored(path: Path) -> dict[str, Any]:
    """The results that a file has."""
    return json.loads(path.read_text("utf-8"))["results"] if path.exists() else {}


def _policy_check(policy: Any, fault: Fault) -> Callable[[int], None]:
    return lambda seed: check_policy(policy, seed=seed, laws=fault.promises)


def _router_check(policy: Any) -> Callable[[int], None]:
    return lambda seed: check_router(policy, seed=seed)


if __name__ == "__main__":
    only = {"type": str, "default": "", "help": "policies whose name has this text"}
    again = {"action": "store_true", "help": "also those that the result file has"}
    options = {"--runs": 10, "--seed": 0, "--only": only, "--again": again}
    run("policy_faults", measure, options)
