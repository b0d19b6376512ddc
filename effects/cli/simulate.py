"""`minfer simulate`: a trace through the engine on a virtual clock."""

import argparse
from typing import Final

from minfer.effects.runs import simulate_command as simulate

DESCRIPTION: Final = (
    "Send the requests of a trace (or of a recorded run, or of a distribution) through "
    "the real scheduler, on a clock of its own and with a model of what steps cost. "
    "Shows latencies, throughput, cache hits and preemptions, of several policies and "
    "sizes side by side; with --seeds, which differences are noise. Needs no model and "
    "no GPU."
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--scheduling-policy",
    "--num-blocks",
    "--block-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--speed",
    "--requests",
    "--slo-ttft",
    "--slo-tpot",
    "--slo-share",
    "--find",
    "--mix",
    "--seeds",
    "--replicas",
    "--cost",
    "--fit",
    "--journal",
    "--csv",
    "--plot",
    "--json",
    "--num-speculative-tokens",
    "--policies",
    "--strict-policy",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer simulate`."""
    simulate.simulate_options(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate a trace; returns the exit code."""
    return simulate.simulate(options)
