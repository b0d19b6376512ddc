"""The command line: which commands there are, and what their errors become.

Each command is a module that says what it takes and runs it (see `Command`). It is
imported when its command is meant, and imports what is heavy when it runs: `--help`
needs no torch. Exit codes: 0; 1 if a request failed; 2 for bad arguments, settings or
checkpoints, with one line on standard error that names the thing and the remedy; 3 if
the engine, which must not, raised in a replay or a simulation; 130 after an interrupt.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, Protocol, cast

from attrs import frozen

import minfer
from minfer.config import ConfigError
from minfer.effects.cli.plugins import policies_option
from minfer.effects.models.config_reader import CheckpointError
from minfer.request import ParameterError
from minfer.runs.journal import JournalError
from minfer.runs.turns import EngineRaisedError

BAD_INPUT: Final = 2
ENGINE_RAISED: Final = 3
INTERRUPTED: Final = 130  # 128 and SIGINT, as a shell counts
READER_LEFT: Final = 141  # 128 and SIGPIPE


class Command(Protocol):
    """What the module of a command has."""

    DESCRIPTION: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Tell the parser what the command takes."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it; returns the exit code."""


@frozen
class Entry:
    """A command as the list of all shows it, and the module that has it."""

    name: str
    help: str
    module: str


COMMANDS: Final = (
    Entry("generate", "continue a text", "minfer.effects.cli.generate"),
    Entry("chat", "talk with a model", "minfer.effects.cli.chat"),
    Entry("serve", "serve a model over HTTP, as OpenAI does", "minfer.effects.cli.serve"),
    Entry("plan", "show what fits into memory", "minfer.effects.cli.plan"),
    Entry(
        "compile",
        "make a GPU's kernels before they are needed, without one",
        "minfer.effects.cli.compile",
    ),
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"minfer: {message}; see {self.prog} --help\n")


class _CommandParser(_Parser):
    """The parser of a command, which learns its options when it is asked to parse."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.module = module

    def parse_known_args(  # type: ignore[override]  # a parser's overloads, all of them
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        command = cast("Command", import_module(self.module))
        self.description = command.DESCRIPTION
        command.add_options(self)
        policies_option(self, default=argparse.SUPPRESS)
        self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = _Parser(
        prog="minfer",
        description="Run a language model. Without --model, a small one that writes "
        "Python and comes with minfer: try `minfer generate`.",
        epilog="`minfer COMMAND --help` says what a command does and takes.",
    )
    version = f"minfer {minfer.__version__}"
    made.add_argument("--version", action="version", version=version)
    policies_option(made, default=None)
    commands = made.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for entry in COMMANDS:
        commands.add_parser(entry.name, help=entry.help, module=entry.module)
    return made
