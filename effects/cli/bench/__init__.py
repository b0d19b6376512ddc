"""`minfer bench`: commands that measure."""

import argparse
from typing import Final

from minfer.effects.cli.commands import Entry, add_commands

DESCRIPTION: Final = "Measure. `minfer bench COMMAND --help` says what a command takes."
COMMANDS: Final = (
    Entry(
        "serve",
        "put load on any OpenAI-compatible server, and time its answers",
        "minfer.effects.cli.bench.serve_load",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of the group."""
    add_commands(parser, COMMANDS)


def run(options: argparse.Namespace) -> int:
    """Never called: a command of the group runs."""
    raise NotImplementedError(options)
