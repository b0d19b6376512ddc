"""The settings of adapters (LoRA) that are more than a number: names, and where adapters
come from.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.checkpoint.hub import is_id
from minfer.values.checks import ConfigError

_MODULE_FIELDS: Final = {"name", "path", "base_model_name"}
MAX_NAME_CHARS: Final = 200
# Words of letters, digits, ".", "_", "-" and ":", between slashes; none begins with ".".
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.:-]*(/[A-Za-z0-9_][\w.:-]*)*", re.ASCII)


class AdapterNameError(ConfigError):
    """A name cannot be given to an adapter, or none has it."""


@frozen
class LoraModule:
    """An adapter that a server is started with."""

    name: str
    path: str  # of its folder, or its name on the hub
    base_model_name: str = ""  # as clients are told


def check_name(name: object) -> str:
    """Returns a name that an adapter may have. Raises AdapterNameError."""
    if (
        not isinstance(name, str)
        or len(name) > MAX_NAME_CHARS
        or not _NAME.fullmatch(name)
    ):
        raise AdapterNameError(
            f"an adapter cannot have the name {name!r:.210}: use up to {MAX_NAME_CHARS} "
            "letters, digits, and . _ - : inside words, which may be divided by /"
        )
    return name


def read_modules(words: Iterable[Any]) -> tuple[LoraModule, ...]:
    """Returns the adapters of --lora-modules: each NAME=PATH, or vLLM's JSON objects with
    name, path and base_model_name, or a list of them. Raises ConfigError.
    """
    modules = [module for word in words for module in _read_module(word)]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules: two adapters have the name {name!r}")
    return tuple(modules)


def _read_module(word: Any) -> list[LoraModule]:
    if not isinstance(word, str):  # in YAML or Python, an object as it is
        return [_module_of(entry) for entry in _as_list(word)]
    text = word.strip()
    if text[:1] in ("{", "["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--lora-modules: not JSON: {error}") from None
        return [_module_of(entry) for entry in _as_list(value)]
    name, separator, path = text.partition("=")
    if not separator or not path:
        raise ConfigError(
            f"--lora-modules: {word!r:.200} is not like NAME=PATH, nor a JSON object "
            "with name and path"
        )
    return [LoraModule(_checked_name(name, "--lora-modules"), path)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _module_of(entry: Any) -> LoraModule:
    """Returns the adapter of a JSON object."""
    if not isinstance(entry, dict):
        raise ConfigError("--lora-modules: an adapter must be a JSON object")
    if unknown := entry.keys() - _MODULE_FIELDS:
        raise ConfigError(
            f"--lora-modules: an adapter has no field {min(map(str, unknown))!r}; it has "
            f"{', '.join(sorted(_MODULE_FIELDS))}"
        )
    for name in ("name", "path"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise ConfigError(f"--lora-modules: an adapter needs a {name}, as a text")
    base = entry.get("base_model_name") or ""
    if not isinstance(base, str):
        raise ConfigError("--lora-modules: base_model_name must be a text")
    return LoraModule(_checked_name(entry["name"], "--lora-modules"), entry["path"], base)


def read_folders(words: Iterable[str]) -> tuple[Path, ...]:
    """Returns the folders of --lora-folders, without links. Raises ConfigError."""
    folders = []
    for word in words:
        try:
            path = Path(word).expanduser().resolve(strict=True)
        except (
            OSError,
            ValueError,
            RuntimeError,
        ):  # circles of links, ~nobody
            raise _no_folder(word) from None
        if not path.is_dir():
            raise _no_folder(word)
        folders.append(path)
    return tuple(folders)


def _no_folder(word: str) -> ConfigError:
    return ConfigError(f"--lora-folders: {word!r:.200} is no folder")


def read_hub_names(words: Iterable[str]) -> dict[str, str]:
    """Returns the adapters of --lora-hub: names, and each one's name on the hub with its
    revision. Raises ConfigError.
    """
    hub = {}
    for word in words:
        name, _, hub_name = word.partition("=")
        repository, _, revision = hub_name.partition("@")
        if not revision or "/" not in repository or not is_id(hub_name):
            raise ConfigError(
                f"--lora-hub: {word!r:.200} is not like NAME=ORG/REPOSITORY@REVISION; "
                "the revision says which files these are"
            )
        hub[_checked_name(name, "--lora-hub")] = hub_name
    return hub


def _checked_name(name: str, option: str) -> str:
    try:
        return check_name(name)
    except AdapterNameError as error:
        raise ConfigError(f"{option}: {error}") from None
