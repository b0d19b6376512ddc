"""`minfer view`: a recorded run as one page of HTML."""

import argparse
from typing import Final

from minfer.effects.runs import view_command as view

DESCRIPTION: Final = (
    "Write one page of HTML, which needs no network, that shows a recorded or simulated "
    "run, or two side by side: sequences, KV blocks, batches, and the reason of every "
    "decision."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer view`."""
    view.view_options(parser)


def run(options: argparse.Namespace) -> int:
    """Draw a journal; returns the exit code."""
    return view.view(options)
