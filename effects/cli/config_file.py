"""Options from a file: `--config FILE`, in YAML, as vLLM reads it.

A key is an option's name without its dashes. True is a flag that is given, false one that
is turned off or not given, a list is several values of an option that takes several, and
an object is JSON. Options on the command line come after those of the file, so that they
count.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from minfer.values.checks import ConfigError

OPTION: Final = "--config"
_REMEDY: Final = "give a file in YAML, with lines such as `max-model-len: 4096`"
_POSITIONAL: Final = ("model", "model-tag")
_OFF: Final = "off"  # YAML reads it as false
_JSON: Final = "JSON"  # the metavar of options whose value is an object
# Returns an option's action by its name, if the command has it.
FindOption = Callable[[str], argparse.Action | None]


class _InFull(argparse.Action):
    """The option, if it was abbreviated: `with_config` takes it away else."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise argparse.ArgumentError."""
        raise argparse.ArgumentError(self, "write its name in full")


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option, for help texts: `with_config` replaces it before parsing."""
    parser.add_argument(
        OPTION,
        action=_InFull,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="read options from a file in YAML: their names, without dashes, and values; "
        "those of the command line come before them",
    )


def with_config(words: Sequence[str], find_option: FindOption) -> list[str]:
    """Returns arguments with those of the file that `--config` names in its place, before
    all other options. Raises ConfigError.
    """
    arguments: list[str] = []
    from_file: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != OPTION:
            arguments.append(word)
            continue
        path = value if equals else next(rest, None)
        if path is None:
            raise ConfigError(f"{OPTION}: names no file; {_REMEDY}")
        from_file += _read(path, find_option)
    # A model before all options: an option with several values would take it for one.
    first = 1 if arguments and not arguments[0].startswith("-") else 0
    return arguments[:first] + from_file + arguments[first:]


def _read(path: str, find_option: FindOption) -> list[str]:
    """Returns the options in a file, as arguments."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{OPTION} {path!r}: {reason}; {_REMEDY}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{OPTION} {path!r}: not YAML: {reason}; {_REMEDY}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{OPTION} {path!r}: not a mapping of names; {_REMEDY}")
    arguments: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-").lstrip("-")
        option = "--model" if name in _POSITIONAL else f"--{name}"
        try:
            arguments += _as_arguments(option, value, find_option)
        except ConfigError as error:
            raise ConfigError(f"{OPTION} {path!r}: {key}: {error}") from None
    return arguments


def _as_arguments(option: str, value: Any, find_option: FindOption) -> list[str]:
    """Returns an option and its value as arguments. Raises ConfigError."""
    if option == OPTION:
        raise ConfigError(f"a file names no other; give each by a {OPTION} of its own")
    match value:
        case None:
            return []
        case True:
            return [option]
        case False:
            return _turned_off(option, find_option)
        case list():
            words = [
                item if isinstance(item, str) else json.dumps(item) for item in value
            ]
            return _several(option, words, find_option(option))
        case dict():
            action = find_option(option)
            if action is not None and action.metavar not in (None, _JSON):
                raise ConfigError("takes one value, not names and values")
            return [f"{option}={json.dumps(value)}"]
    return [f"{option}={value}"]


def _turned_off(option: str, find_option: FindOption) -> list[str]:
    """Returns the arguments that turn an option off."""
    action, negation = find_option(option), f"--no-{option.removeprefix('--')}"
    if action is None or find_option(negation) is not None:
        return [negation]
    if _OFF in (action.choices or ()):
        return [f"{option}={_OFF}"]
    is_flag = action.nargs == 0
    return [] if is_flag else [negation]  # which is unknown


def _several(
    option: str, words: Sequence[str], action: argparse.Action | None
) -> list[str]:
    """Returns an option and several values as arguments. Raises ConfigError."""
    if not words:
        return []
    if action is None or action.nargs in ("+", "*"):
        return [option, *words]
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={word}" for word in words]
    raise ConfigError("takes one value, not a list")
