"""`python -m tests.plane.run --runs 10000`: every seed twice, in processes of other hash
seeds.

Prints how often everything happened; a failure prints the seed that repeats it.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from attrs import define, field

from bench.results import write

ROOT = Path(__file__).parents[2]


@define
class Report:
    """What runs led to; `flaws` by seed."""

    tally: Counter[str] = field(factory=Counter)
    flaws: dict[int, str] = field(factory=dict)


def child(first: int, runs: int, step: int, plant: str) -> None:
    """Print a line of JSON for each seed: its digest or its flaw, and what happened in
    it.
    """
    from tests.plane.plane import run_seed
    from tests.plane.planted import planted

    logging.disable()
    warnings.simplefilter("error")
    broken: list[Any] = []  # what was raised where it could not be caught
    sys.unraisablehook = broken.append
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if plant:
            stack.enter_context(planted(plant))
        for seed in range(first, first + runs, step):
            reported: dict[str, Any] = {
                "seed": seed,
                "digest": "",
                "flaw": "",
                "tally": {},
            }
            try:
                reported["digest"], reported["tally"] = run_seed(
                    seed, Path(folder) / "journal"
                )
                assert not broken, broken
            except Exception:
                reported["flaw"] = traceback.format_exc()
                broken.clear()
            print(json.dumps(reported), flush=True)
            if seed // step % 32 == 0:
                # engines freeze what is there, and so what earlier seeds left
                gc.collect()


def compare(first: int, runs: int, jobs: int = 2, plant: str = "") -> Report:
    """Run seeds in `jobs` processes, at least two, and compare."""
    report, pairs = Report(), max(1, jobs // 2)
    code = [sys.executable, "-m", "tests.plane.run", "--child", "--plant", plant]
    with contextlib.ExitStack() as stack:
        processes = []
        for pair in range(min(pairs, runs)):
            args = [
                f"--first-seed={first + pair}",
                f"--runs={runs - pair}",
                f"--jobs={pairs}",
            ]
            for salt in ("1", "2"):
                env = {**os.environ, "PYTHONHASHSEED": salt}
                options: Any = {
                    "env": env,
                    "cwd": ROOT,
                    "stdout": subprocess.PIPE,
                    "text": True,
                }
                processes.append(
                    stack.enter_context(subprocess.Popen([*code, *args], **options))
                )
        for number in range(runs):
            first_process = 2 * (number % pairs)
            lines = [
                process.stdout.readline() if process.stdout else ""
                for process in processes[first_process : first_process + 2]
            ]
            seed, reported = first + number, [json.loads(line or "{}") for line in lines]
            if not all(result.get("digest") for result in reported):
                report.flaws[seed] = next(
                    (t["flaw"] for t in reported if t.get("flaw")), "it died"
                )
            elif reported[0] != reported[1]:
                report.flaws[seed] = "two processes, two digests"
            report.tally += Counter(reported[0].get("tally", {}))
            if number % 500 == 499:
                print(
                    f"{number + 1} runs, {len(report.flaws)} flaws",
                    file=sys.stderr,
                    flush=True,
                )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--plant", default="", help="a bug to put in: see planted.py")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/NAME.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.first_seed, args.runs, args.jobs, args.plant)
        return 0
    begin = time.perf_counter()
    report = compare(args.first_seed, args.runs, args.jobs, args.plant)
    took = time.perf_counter() - begin
    for seed, flaw in list(report.flaws.items())[:5]:
        print(
            f"{flaw}\nseed {seed}: python -m tests.plane.run --runs 1 --first-seed "
            f"{seed}\n"
        )
    for kind, count in sorted(report.tally.items()):
        print(f"{count:9} {kind}")
    print(
        f"{args.runs} runs, each twice: {len(report.flaws)} flaws; {took:.0f} s, "
        f"{2 * args.runs / took:.1f} runs/s"
    )
    if args.result:
        reported = {
            "runs": args.runs,
            "flaws": report.flaws,
            "happened": report.tally,
            "seconds": took,
        }
        write(args.result, reported, args.first_seed)
    return bool(report.flaws)


if __name__ == "__main__":
    sys.exit(main())
