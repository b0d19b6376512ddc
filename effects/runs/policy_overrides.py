"""Policy overrides in the results of commands: a warning, or by an option an error."""

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from minfer.journal.overrides import OverrideCounts
from minfer.policies.mistakes import PolicyWarning


def strict_option(parser: argparse.ArgumentParser) -> None:
    """Add `--strict-policy`."""
    parser.add_argument(
        "--strict-policy",
        action="store_true",
        help="end with an error at the first answer of the scheduling policy that cannot "
        "be used, and at a method that the engine never calls, as its name is nearly one "
        "of the protocol's (default: go on as first come, first served, count, and warn)",
    )


def counts_of(policy: object, *, strict: bool) -> OverrideCounts:
    """New counts of a policy's overrides. Raises PolicyOverrideError, if `strict`, for a
    method that the engine never calls.
    """
    counts = OverrideCounts(strict)
    if strict:  # otherwise `--policies` has warned
        counts.check_methods(policy)
    return counts


def warn_of_overrides(source: object, policy: object, counts: OverrideCounts) -> None:
    """Print a warning about the overrides of a run, if there are any."""
    if sentence := counts.sentence(policy):
        print(f"minfer: {source}: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def without_python_warnings() -> Iterator[None]:
    """Silence the warnings of a simulation, whose counts a command prints itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        yield
