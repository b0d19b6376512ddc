"""The command line: all commands, and their exit codes.

Each command is a module that adds its options and runs the command (see `commands.py`).
It is imported only when its command is used, and imports heavy modules when it runs:
`--help` needs no torch. Exit codes are those of `minfer.effects.cli.exit_codes`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import minfer
from minfer.effects.cli.commands import CommandLineParser, Entry, add_commands
from minfer.effects.cli.exit_codes import guarded
from minfer.effects.cli.plugins import policies_option
from minfer.effects.execution.ranks.rank_folder import is_other_rank, is_rank
from minfer.values.checks import ConfigError

COMMANDS: Final = (
    Entry("generate", "continue a text", "minfer.effects.cli.generate"),
    Entry("chat", "talk with a model", "minfer.effects.cli.chat"),
    Entry("serve", "serve a model over HTTP, as OpenAI does", "minfer.effects.cli.serve"),
    Entry(
        "route",
        "pass requests on to several servers",
        "minfer.effects.cli.route",
    ),
    Entry("status", "show how a running server is", "minfer.effects.cli.status"),
    Entry("plan", "show what fits into memory", "minfer.effects.cli.plan"),
    Entry(
        "verify",
        "check that a model computes here what transformers computes",
        "minfer.effects.cli.verify.command",
    ),
    Entry(
        "compare",
        "show levels of quantization beside each other",
        "minfer.effects.cli.compare.command",
    ),
    Entry(
        "quantize",
        "write a quantized checkpoint",
        "minfer.effects.cli.quantize",
    ),
    Entry(
        "replay",
        "check or change what a recorded run decided",
        "minfer.effects.cli.replay",
    ),
    Entry(
        "explain",
        "say why a recorded request took as long as it did",
        "minfer.effects.cli.explain",
    ),
    Entry("view", "draw a recorded run as a page of HTML", "minfer.effects.cli.view"),
    Entry(
        "simulate",
        "predict how a load would be served, without a model",
        "minfer.effects.cli.simulate",
    ),
    Entry("bench", "measure a server under load", "minfer.effects.cli.bench"),
)

SERVERS: Final = ("serve", "route")
REMOVED: Final = {
    "compile": "serve compiles what it needs at start, and finds it in TRITON_CACHE_DIR "
    "the next time",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""

    def run() -> int:
        arguments = sys.argv[1:] if argv is None else argv
        command = _command(arguments)
        if command in SERVERS and argv is None:
            # Set before imports and loading, which take seconds. Until the server runs
            # and handles the signal itself, the process can end at once.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        if is_rank():
            from minfer.effects.net.child import begin_as_child

            begin_as_child()
        if is_other_rank():  # whatever the command: rank 0 says what to do
            from minfer.effects.live.engine.ranks import follow_rank_0

            os._exit(follow_rank_0())  # threads may wait for rank 0
        if command in REMOVED:
            raise ConfigError(f"{command} was removed: {REMOVED[command]}")
        options = parser().parse_args(arguments)
        code: int = options.run(options)
        return code

    return guarded(run)


def _command(given: Sequence[str]) -> str:
    """The first argument that is neither an option nor an option's value."""
    words = iter(given)
    for word in words:
        if not word.startswith("-"):
            return word
        if len(word) > 2 and "--policies".startswith(word):  # as argparse reads it
            next(words, None)
    return ""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = CommandLineParser(
        prog="minfer",
        description="Run a language model. Without --model, the bundled one, a "
        "toy that shows that the engine works: try `minfer generate`.",
        epilog="`minfer COMMAND --help` says what a command does and takes, "
        "and --help-all names its rare options, too.",
    )
    version = f"minfer {minfer.__version__}"
    made.add_argument("--version", action="version", version=version)
    policies_option(made, default=None)
    add_commands(made, COMMANDS)
    return made
