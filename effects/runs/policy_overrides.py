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
        "be used (default: go on as first come, first served, count, and warn)",
    )


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
