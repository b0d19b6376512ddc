"""`minfer serve`: a model over HTTP."""

import argparse
import os
from typing import Final

from minfer.effects.cli.options import dry_run_option, engine_options
from minfer.effects.setup.values import read_bytes

DESCRIPTION: Final = (
    "Serve a model over HTTP, so that programs written for OpenAI's API can use it: "
    "their base URL is http://HOST:PORT/v1. Ctrl-C ends it."
)
BODY_SIZE: Final = 2**22  # bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer serve` takes."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help="the same as --model"
    )
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets other machines in (default: "
        "%(default)s, this machine alone)",
    )
    add("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model (default: its folder's name, or its name on "
        "the hub)",
    )
    add(
        "--api-key",
        default=os.environ.get("MINFER_API_KEY", ""),
        metavar="KEY",
        help="what clients must send (default: the environment's MINFER_API_KEY; "
        "without either, nothing)",
    )
    add(
        "--max-body-size",
        type=read_bytes,
        default=BODY_SIZE,
        metavar="BYTES",
        help="most bytes of a request (default: 4M)",
    )
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help="answer 503 to whoever comes while N samples wait in line (default: about "
        "a million)",
    )
    add("--access-log", action="store_true", help="write a line for each request")
    engine_options(parser)
    dry_run_option(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    from minfer.effects.serving.server import serve  # it imports the HTTP server

    return serve(options)
