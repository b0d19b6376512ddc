"""Commands, and parsers that know them without importing them.

A command is a module that adds its options and runs the command. It is imported only when
it is used. A group of commands, such as `minfer bench`, is a module too: it adds its own
commands to the parser that it is given.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, Protocol, cast

from attrs import frozen

from minfer.effects.cli.errors import BAD_INPUT
from minfer.effects.cli.plugins import policies_option
from minfer.effects.setup.removed import refuse

POLICY: Final = "--scheduling-policy"  # in all commands that have such an option
RENAMED: Final = {"--policy": f"use {POLICY}"}


class Command(Protocol):
    """The contents of a command's module."""

    DESCRIPTION: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to the parser."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it; returns the exit code."""


@frozen
class Entry:
    """A command in the list of all, and its module."""

    name: str
    help: str
    module: str


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit."""
        self.exit(BAD_INPUT, f"minfer: {message}; see {self.prog} --help\n")


class _CommandParser(Parser):
    """The parser of a command, which gets its options when it begins to parse."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.module = module

    def parse_known_args(  # type: ignore[override]  # a parser's overloads, all of them
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        command = cast("Command", import_module(self.module))
        self.description = command.DESCRIPTION
        self.set_defaults(run=command.run)
        command.add_options(self)
        if POLICY in self._option_string_actions:
            refuse(self, RENAMED, was="renamed")
        policies_option(self, default=argparse.SUPPRESS)
        return super().parse_known_args(args, namespace)


def add_commands(parser: argparse.ArgumentParser, entries: Iterable[Entry]) -> None:
    """Add commands to a parser, which prints its help if no command is given."""

    def run(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return BAD_INPUT

    parser.set_defaults(run=run)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=_CommandParser
    )
    for entry in entries:
        commands.add_parser(entry.name, help=entry.help, module=entry.module)
