"""`minfer replay`: verify a recorded engine's decisions, or change the run and go on."""

import argparse
from typing import Final

from minfer.effects.runs import replay_command as replay

DESCRIPTION: Final = (
    "Decide again all that a recorded run decided (see --journal of generate, chat and "
    "serve), and compare each decision with the recorded one. Needs no model. With "
    "--at, show what the engine held at a turn; with one of the options under `fork`, "
    "change one thing there and go on."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer replay`."""
    replay.replay_options(parser)


def run(options: argparse.Namespace) -> int:
    """Replay a journal; returns the exit code."""
    return replay.replay(options)
