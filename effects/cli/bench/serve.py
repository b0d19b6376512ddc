"""`minfer bench serve`: load on an OpenAI-compatible server."""

import argparse
from typing import Final

from minfer.effects.runs.load.options import add_options as load_options

DESCRIPTION: Final = (
    "Put load on a server that speaks OpenAI's API, whoever made it, and show what its "
    "clients saw: requests and tokens a second, and how long they waited for the first "
    "token (TTFT), for each that followed (TPOT, ITL) and for all (E2EL). Either N "
    "clients send one request after the other (--max-concurrency N), or requests come at "
    "a rate, answered or not (--request-rate R), or as a trace recorded them (--trace). "
    "Ctrl-C shows what was measured until then. Exit code 1 if requests failed."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer bench serve` takes."""
    load_options(parser)


def run(options: argparse.Namespace) -> int:
    """Put load on a server; returns the exit code."""
    from minfer.effects.runs.load.command import bench_serve  # it imports numpy

    return bench_serve(options)
