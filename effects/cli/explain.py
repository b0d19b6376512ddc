"""`minfer explain`: where one recorded request's time went, and why."""

import argparse
from typing import Final

from minfer.effects.runs import explain

DESCRIPTION: Final = (
    "Say of one request of a recorded run (see --journal of serve) what it waited for, "
    "who took its place and for whom, how much of its prompt was cached, and where its "
    "time went. Without a request, list those of the run. Needs no model."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer explain`."""
    explain.explain_options(parser)


def run(options: argparse.Namespace) -> int:
    """Explain a request; returns the exit code."""
    return explain.explain(options)
