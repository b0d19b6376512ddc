"""Commands, and parsers that know them without importing them.

A command is a module that adds its options and runs the command. It is imported only when
it is used.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, Protocol, cast

from attrs import frozen

from minfer.effects.cli.config_file import OPTION as CONFIG_OPTION
from minfer.effects.cli.config_file import with_config
from minfer.effects.cli.exit_codes import BAD_INPUT
from minfer.effects.cli.plugins import policies_option
from minfer.effects.setup.dotted_options import with_objects
from minfer.effects.setup.flexible_parser import FlexibleArgumentParser, with_dashes
from minfer.effects.setup.removed import refuse
from minfer.values.checks import ConfigError

POLICY: Final = "--scheduling-policy"  # in all commands that have such an option
MODEL_WORD: Final = "model_word"  # a model without its option; it becomes that one
_MODEL: Final = "--model"
_TRUTHS: Final = ("true", "false")
RENAMED: Final = {"--policy": f"use {POLICY}"}


class CliCommand(Protocol):
    """The contents of a command's module.

    It may have `COMMON`, too: the options that `--help` shows, by default all that are
    its own. The others are shown by `--help-all` alone.
    """

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


class CommandLineParser(FlexibleArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit."""
        self.exit(BAD_INPUT, f"minfer: {message}; see {self.prog} --help\n")


class _CommandParser(CommandLineParser):
    """The parser of a command, which gets its options when it begins to parse."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.module = module
        self.all_options = 0
        # Options that the help leaves out, and their texts.
        self.rare: dict[argparse.Action, str | None] = {}

    def parse_known_args(  # type: ignore[override]  # a parser's overloads, all of them
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        command = cast("CliCommand", import_module(self.module))
        self.description = command.DESCRIPTION
        self.set_defaults(run=command.run)
        command.add_options(self)
        common = getattr(command, "COMMON", tuple(self._option_string_actions))
        if POLICY in self._option_string_actions:
            refuse(self, RENAMED, verb="renamed")
        policies_option(self, default=argparse.SUPPRESS)
        self._show_only({"--help", *common})
        typed = with_dashes(sys.argv[1:] if args is None else args)
        try:
            words = given = with_objects(typed)
        except ConfigError as error:
            self.error(str(error))
        if CONFIG_OPTION in self._option_string_actions:
            words = with_config(words, self._find_option)
        self._add_vllm_options(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if len(unknown) == 1 and not unknown[0].startswith("-"):
            unknown = self._take_late_word(parsed, unknown[0])
        if unknown and _MODEL in self._option_string_actions:
            self._hint_at_model(unknown[0])
        if unknown:
            self.refuse_unknown(unknown)
        if hasattr(parsed, MODEL_WORD):
            self._take_model_word(parsed, given)
        return parsed, unknown

    def _take_model_word(self, parsed: Any, given: Sequence[str]) -> None:
        """Make the word that names the model the value of its option, which may be
        `given` as well, but then the same.
        """
        word = vars(parsed).pop(MODEL_WORD)
        if word.startswith("-"):  # to argparse, an option with a blank is none
            self.refuse_unknown([word])
        if word.lower() in _TRUTHS:
            self.error(
                f"unrecognized argument {word!r}; a flag has no value: leave that out, "
                "or turn the flag off by --no-..."
            )
        has_option = any(name.partition("=")[0] == _MODEL for name in given)
        if has_option and parsed.model != word:
            self.error(
                f"there are two models, {parsed.model!r} and {word!r}; leave one out"
            )
        parsed.model = word

    def _find_option(self, name: str) -> argparse.Action | None:
        """Returns the option of a name, also one of vLLM's."""
        self._add_vllm_options([name])
        return self._option_string_actions.get(name)

    def _add_vllm_options(self, words: Sequence[str]) -> None:
        """Add options of vLLM's that are among the words and that the command lacks."""
        names = {word.partition("=")[0] for word in words if word.startswith("-")}
        if unknown := names - self._option_string_actions.keys():
            # It has a large table.
            from minfer.effects.cli.vllm_command_line import add_vllm_options

            add_vllm_options(self, unknown)

    def _take_late_word(self, parsed: Any, word: str) -> list[str]:
        """Take a word as the argument that may be left out: before Python 3.13, argparse
        does not, if an option is between it and the argument before it. Returns the
        words that are left.
        """
        for action in self._actions:
            is_optional = not action.option_strings and action.nargs == "?"
            value = getattr(parsed, action.dest, action.default)
            if is_optional and value == action.default:
                setattr(parsed, action.dest, word)
                return []
        return [word]

    def _hint_at_model(self, word: str) -> None:
        """Refuse a word that looks like a model without its option."""
        if not word.startswith("-") and (word.endswith(".gguf") or "/" in word):
            self.error(f"unrecognized argument {word!r}; name a model by --model {word}")

    def _show_only(self, common: Collection[str]) -> None:
        """Leave options that are not common out of the help, and add `--help-all`."""
        self.add_argument(
            "--help-all", nargs=0, action=_HelpAll, help="show all options and exit"
        )
        common = {"--help-all", *common}
        shown = [
            action
            for action in self._actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ]
        self.all_options = len(shown)
        for action in shown:
            if common.isdisjoint(action.option_strings):
                self.rare[action] = action.help
                action.help = argparse.SUPPRESS

    def format_help(self) -> str:
        """The help; its last line says how to see all options."""
        text = super().format_help()
        if not self.rare:
            return text
        return f"{text}\n{self.prog} --help-all shows all {self.all_options} options\n"

    def show_all(self) -> None:
        """Have the help show all options."""
        for action, text in self.rare.items():
            action.help = text
        self.rare.clear()


class _HelpAll(argparse.Action):
    """Prints the help with all options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        cast("_CommandParser", parser).show_all()
        parser.print_help()
        parser.exit()


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
