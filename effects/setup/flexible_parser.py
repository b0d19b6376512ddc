"""A command line's parser that takes what vLLM's takes: underscores in the names of
options, and keys of JSON objects behind a dot. It names the nearest option where one is
wrong.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from minfer.effects.setup.dotted_options import with_objects
from minfer.effects.setup.nearest import nearest
from minfer.values.checks import ConfigError


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser to which `--max_model_len` is `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]  # a parser's overloads, all of them
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; returns them, and those that are unknown."""
        if args is None:
            import sys

            args = sys.argv[1:]
        words = with_dashes(args)
        if self._subparsers is None:  # else the parser of the command does it
            try:
                words = with_objects(words)
            except ConfigError as error:
                self.error(str(error))
        return super().parse_known_args(words, namespace)

    def parse_args(  # type: ignore[override]  # likewise
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments. An unknown one is an error, which names the nearest option."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Exit with an error about arguments that are unknown."""
        name = words[0].partition("=")[0]
        near = nearest(name, self._option_string_actions)
        hint = f"; did you mean {near}?" if near and name.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def with_dashes(words: Iterable[str]) -> list[str]:
    """Returns arguments with dashes in the names of options, in place of underscores.
    Keys behind a dot stay as they are.
    """
    changed: list[str] = []
    options_end = False
    for word in words:
        options_end = options_end or word == "--"
        name, equals, value = word.partition("=")
        if word.startswith("--") and not options_end:
            option, dot, key = name.partition(".")
            word = option.replace("_", "-") + dot + key + equals + value
        changed.append(word)
    return changed
