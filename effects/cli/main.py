"""The command line: which commands there are, and what their errors become.

Each command is a module that says what it takes and runs it (see `commands.py`). It
is imported when its command is meant, and imports what is heavy when it runs: `--help`
needs no torch. Exit codes: 0; 1 if a request failed; 2 for bad arguments, settings or
checkpoints, with one line on standard error that names the thing and the remedy; 3 if
the engine, which must not, raised in a replay or a simulation; 130 after an interrupt.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

import minfer
from minfer.config import ConfigError
from minfer.effects.cli.commands import BAD_INPUT, Entry, Parser, add_commands
from minfer.effects.cli.plugins import policies_option
from minfer.effects.models.config_reader import CheckpointError
from minfer.request import ParameterError
from minfer.runs.journal import JournalError
from minfer.runs.turns import EngineRaisedError

ENGINE_RAISED: Final = 3
INTERRUPTED: Final = 130  # 128 and SIGINT, as a shell counts
READER_LEFT: Final = 141  # 128 and SIGPIPE


COMMANDS: Final = (
    Entry("generate", "continue a text", "minfer.effects.cli.generate"),
    Entry("chat", "talk with a model", "minfer.effects.cli.chat"),
    Entry("serve", "serve a model over HTTP, as OpenAI does", "minfer.effects.cli.serve"),
    Entry("plan", "show what fits into memory", "minfer.effects.cli.plan"),
    Entry(
        "verify",
        "check that a model computes here what transformers computes",
        "minfer.effects.cli.verify",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = parser().parse_args(argv)
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except EngineRaisedError as error:
        print(f"minfer: {error}", file=sys.stderr)
        return ENGINE_RAISED
    except BrokenPipeError:
        # Whoever read us has gone. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except ValueError as error:
        if not isinstance(error, _users_errors()):
            raise
        print(f"minfer: {error}", file=sys.stderr)
        return BAD_INPUT
    return code


def _users_errors() -> tuple[type[ValueError], ...]:
    """Errors that say what was wrong with what we were given."""
    from minfer.effects.live.edge import RequestError
    from minfer.effects.text.chat import ChatTemplateError

    return (
        ConfigError,
        RequestError,
        CheckpointError,
        ParameterError,
        ChatTemplateError,
        JournalError,
    )


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = Parser(
        prog="minfer",
        description="Run a language model. Without --model, a small one that writes "
        "Python and comes with minfer: try `minfer generate`.",
        epilog="`minfer COMMAND --help` says what a command does and takes.",
    )
    version = f"minfer {minfer.__version__}"
    made.add_argument("--version", action="version", version=version)
    policies_option(made, default=None)
    add_commands(made, COMMANDS)
    return made
