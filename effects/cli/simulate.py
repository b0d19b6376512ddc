"""`minfer simulate`: a trace through the engine on a virtual clock."""

import argparse
from typing import Final

from minfer.effects.runs import simulate

DESCRIPTION: Final = (
    "Send the requests of a trace (or of a recorded run, or of a distribution) through "
    "the real scheduler, on a clock of its own and with a model of what steps cost. "
    "Shows latencies, throughput, cache hits and preemptions, of several policies and "
    "sizes side by side. Needs no model and no GPU."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer simulate`."""
    simulate.simulate_options(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate a trace; returns the exit code."""
    return simulate.simulate(options)
