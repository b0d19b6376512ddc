"""`minfer bench serve`: load on an OpenAI-compatible server."""

import argparse
from importlib.util import find_spec
from typing import Final

from minfer.effects.runs.load.load_options import add_options as load_options
from minfer.effects.runs.load.request_record import LoadError
from minfer.extras import how_to_install

DESCRIPTION: Final = (
    "Put load on any server that speaks OpenAI's API, and show what its clients measure: "
    "requests and tokens a second, and latencies: to the first token (TTFT), for each "
    "that follows (TPOT), between events (ITL) and of whole answers (E2EL). Either N "
    "clients send one request after the other (--max-concurrency N), or requests are "
    "sent at a rate, answered or not (--request-rate R). A key comes from the "
    "environment's OPENAI_API_KEY. Ctrl-C and other signals show what was measured until "
    "then. Exit code 1 if requests failed."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer bench serve`."""
    load_options(parser)


def run(options: argparse.Namespace) -> int:
    """Put load on a server; returns the exit code. Raises LoadError."""
    if find_spec("aiohttp") is None:
        raise LoadError(f"minfer bench serve needs aiohttp: {how_to_install('load')}")
    from minfer.effects.runs.load.command import bench_serve  # it imports aiohttp

    return bench_serve(options)
