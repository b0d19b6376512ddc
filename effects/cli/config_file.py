"""Options from a file: `--config FILE`, in YAML, as vLLM reads it.

A key is an option's name without its dashes. True is a flag that is given, false one that
is turned off (`--no-...`), a list is several values, and an object is JSON. Options on
the command line come after those of the file, so that they count.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from minfer.values.checks import ConfigError

OPTION: Final = "--config"
_REMEDY: Final = "give a file in YAML, with lines such as `max-model-len: 4096`"
_POSITIONAL: Final = ("model", "model-tag")


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option, for help texts: `with_config` replaces it before parsing."""
    parser.add_argument(
        OPTION,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="read options from a file in YAML: their names, without dashes, and values; "
        "those of the command line come before them",
    )


def with_config(words: Sequence[str]) -> list[str]:
    """Returns arguments with those of the file that `--config` names in its place, before
    all others. Raises ConfigError.
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
        from_file += _read(path)
    return from_file + arguments


def _read(path: str) -> list[str]:
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
        arguments += _as_arguments(option, value)
    return arguments


def _as_arguments(option: str, value: Any) -> list[str]:
    """Returns an option and its value as arguments."""
    match value:
        case None:
            return []
        case True:
            return [option]
        case False:
            return [f"--no-{option.removeprefix('--')}"]
        case list():
            words = [
                item if isinstance(item, str) else json.dumps(item) for item in value
            ]
            return [option, *words] if words else []
        case dict():
            return [f"{option}={json.dumps(value)}"]
    return [f"{option}={value}"]
