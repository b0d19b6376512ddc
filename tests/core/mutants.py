"""Which small bugs the core's tests notice: see `tests.mutation`.

`python -m tests.core.mutants` makes the mutants of the core's deciding files, runs the
core's tests on each, and lists what survives and is not known to be equivalent; that is
exit status 1.
"""

import argparse
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from attrs import frozen

from tests.core.equivalents import EQUIVALENT
from tests.mutation import catalogue, runner
from tests.mutation.catalogue import Mutant
from tests.mutation.runner import Fate

KILLED_SHARE: Final = 0.97  # of those that are not equivalent; in a sample, all of them
EQUIVALENT_SHARE: Final = 0.10  # of all, at most


@frozen
class Verdict:
    """Results against what is known of equivalents."""

    fates: tuple[Fate, ...]
    survivors: tuple[Fate, ...]  # that are not listed as equivalent
    refuted: tuple[str, ...]  # listed as equivalent, and killed all the same
    gone: tuple[str, ...]  # listed as equivalent, but there is no such mutant

    @property
    def equivalent(self) -> int:
        """How many survived and are equivalent."""
        return sum(not fate.dead for fate in self.fates) - len(self.survivors)

    @property
    def share(self) -> float:
        """Of those that are not equivalent, which are killed."""
        real = len(self.fates) - self.equivalent
        return 1 - len(self.survivors) / real if real else 1.0


def judged(fates: Iterable[Fate], listed: Iterable[str] = EQUIVALENT) -> Verdict:
    """Hold results against the list of equivalents."""
    fates, listed = tuple(fates), set(listed)
    survivors = tuple(fate for fate in fates if not fate.dead and fate.key not in listed)
    refuted = tuple(fate.key for fate in fates if fate.dead and fate.key in listed)
    there = {one.key for file in catalogue.files() for one in catalogue.all_of(file)}
    return Verdict(fates, survivors, refuted, tuple(sorted(listed - there)))


def table(verdict: Verdict) -> list[str]:
    """How many of each file were killed."""
    lines = [
        (
            f"{'file':24}{'mutants':>8}{'killed':>8}{'endless':>8}"
            f"{'equal':>7}{'alive':>7}{'CPU s':>8}"
        )
    ]
    alive = {fate.key for fate in verdict.survivors}
    names = sorted({fate.key.partition(" | ")[0] for fate in verdict.fates})
    for name in (*names, ""):
        mine = [
            fate for fate in verdict.fates if fate.key.startswith(name and f"{name} | ")
        ]
        here = sum(fate.key in alive for fate in mine)
        dead = sum(fate.dead for fate in mine)
        endless = sum(fate.outcome == "endless" for fate in mine)
        row = (
            len(mine),
            dead,
            endless,
            len(mine) - dead - here,
            here,
            sum(f.cpu for f in mine),
        )
        counts = f"{row[0]:>8}{row[1]:>8}{row[2]:>8}{row[3]:>7}{row[4]:>7}{row[5]:>8.0f}"
        lines.append(f"{name or 'all':24}{counts}")
    return lines


def report(verdict: Verdict) -> int:
    """Print a verdict; 0 if it is good."""
    print("\n".join(table(verdict)))
    for fate in verdict.survivors:
        print(f"{fate.outcome}: {fate.key}")
    for key in verdict.refuted:
        print(f"listed as equivalent, but killed: {key}")
    for key in verdict.gone:
        print(f"listed as equivalent, but not there: {key}")
    print(f"{verdict.share:.1%} of those that are not equivalent are killed")
    few = (
        verdict.equivalent <= EQUIVALENT_SHARE * len(verdict.fates)
        or len(verdict.fates) < 100
    )
    enough = (
        verdict.share >= KILLED_SHARE
        if len(verdict.fates) > 100
        else not verdict.survivors
    )
    return int(not (few and enough) or bool(verdict.refuted or verdict.gone))


def control() -> Fate:
    """The core as it is must pass, and leave time; raises AssertionError."""
    fate = runner.run(None, runner.tests_digest())
    if fate.dead or fate.outcome != "survived":
        raise AssertionError(
            f"the core as it is does not pass: {fate.outcome}, {fate.by}"
        )
    print(f"the core as it is passes in {fate.cpu:.0f} s of CPU", flush=True)
    return fate


def _tell(fate: Fate) -> None:
    print(f"{fate.outcome:10} {fate.cpu:6.1f} s  {fate.key}  {fate.by}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="run so many, not all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument(
        "--each",
        type=int,
        default=catalogue.MUTANTS_PER_KIND,
        help="of a kind in a function",
    )
    parser.add_argument(
        "--files", nargs="*", metavar="FILE", help="of the core; all that decide"
    )
    parser.add_argument("--key", help="run one mutant, by its name")
    parser.add_argument(
        "--out", type=Path, help="keep results there, and go on from what is there"
    )
    parser.add_argument("--list", action="store_true", help="print names and run nothing")
    args = parser.parse_args()
    mutants: list[Mutant] = catalogue.chosen(args.files or catalogue.files(), args.each)
    if args.key:
        mutants = [catalogue.named(args.key)]
    if args.sample is not None:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
    if args.list:
        print("\n".join(mutant.key for mutant in mutants))
        return 0
    control()
    return report(judged(runner.run_all(mutants, args.jobs, args.out, _tell)))


if __name__ == "__main__":
    sys.exit(main())
