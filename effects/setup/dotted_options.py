"""Options whose value is a JSON object, with one key of it at a time, as vLLM takes them.

    --speculative-config.method ngram --speculative-config.num_speculative_tokens 3
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'

Both say the same. A key may have keys itself (`--option.key.inner 3`), and one that ends
with a plus sign is a list with one more entry. Values are JSON, or else texts.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from minfer.values.checks import ConfigError

# What may have keys. Neither may -0.5, nor a short option with its value, -ofile.html.
_OPTION: Final = re.compile(r"--[a-zA-Z][\w-]*|-[acs]c")
_KEYS: Final = re.compile(r"[\w.-]+\+?")  # no blanks: then it is a text, such as a prompt
_LEVEL: Final = re.compile(r"-O=?(\d*)")  # vLLM's -O, -O3 and -O=3
_LEVEL_OPTION, _COMPILATION = "--optimization-level", "--compilation-config"


def with_objects(words: Sequence[str]) -> list[str]:
    """Returns arguments with one object for each option that is given by keys. Raises
    ConfigError.
    """
    objects: dict[str, dict[str, Any]] = {}
    changed: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            changed += [word, *rest]
            break
        option, dot, key = _in_full(word.partition("=")[0]).partition(".")
        if not (dot and _OPTION.fullmatch(option) and _KEYS.fullmatch(key)):
            changed.append(_in_full(word))
            continue
        if option not in objects:
            objects[option] = {}
            changed.append(option)
        _insert(objects[option], option, key, _value(word, rest))
    for option, content in objects.items():
        if sum(word.partition("=")[0] == option for word in changed) > 1:
            raise ConfigError(f"{option} is given as a whole and by keys; leave one out")
        changed[changed.index(option)] = (
            f"{option}={json.dumps(content, separators=(',', ':'))}"
        )
    return changed


def _in_full(word: str) -> str:
    """Returns vLLM's short names of a level and of its settings in full."""
    if word.startswith("-O."):
        return _COMPILATION + word.removeprefix("-O")
    if (level := _LEVEL.fullmatch(word)) is not None:
        return f"{_LEVEL_OPTION}={level[1]}" if level[1] else _LEVEL_OPTION
    return word


def _value(word: str, rest: Iterator[str]) -> Any:
    """Returns the value of an option: behind its equals sign, or the next argument."""
    name, equals, value = word.partition("=")
    if not equals:
        value = next(rest, "--")
        if value.startswith("--"):
            raise ConfigError(f"{name} needs a value")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _insert(content: dict[str, Any], option: str, path: str, value: Any) -> None:
    """Insert a value at a path of keys. Raises ConfigError."""
    *outer, last = path.split(".")
    for key in outer:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{option}.{path}: {key!r} has a value, and no keys")
    if not last.endswith("+"):
        content[last] = value
        return
    entries = content.setdefault(last.removesuffix("+"), [])
    if not isinstance(entries, list):
        raise ConfigError(f"{option}.{path}: this is no list; leave the + out")
    entries.append(value)
