"""`minfer explain`: where one recorded request's time went, and why."""

import argparse
from typing import Final

from minfer.effects.runs import explain_command as explain
from minfer.effects.runs.explain_list import MAX_LISTED

DESCRIPTION: Final = (
    "Explain where the time of a recorded request went: what it waited for, how often it "
    "was preempted and for which request, how much of its prompt was cached, and how its "
    "drafts did, the verdict and a remedy first. Without REQUEST, say what held the "
    f"requests of all runs up, and list the {MAX_LISTED} that waited longest, or all "
    "with --json. Runs are recorded by --journal of serve, chat and generate. Needs "
    "no model."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer explain`."""
    explain.explain_options(parser)


def run(options: argparse.Namespace) -> int:
    """Explain a request; returns the exit code."""
    return explain.explain(options)
