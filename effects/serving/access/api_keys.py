"""API keys: access, and priorities.

Keys come from the command line and from a file, JSON or TOML, with a table for each:

    [[keys]]
    name = "team-a"                # for the scheduler and the log
    key = "sk-..."
    priority = -1                  # optional
    tenant = "customer-1"          # whose prefix cache it uses; default: its name
    admin = true                   # may reset all of the prefix cache, and load adapters;
                                   # default: false
    adapters = ["team-a/*"]        # that it may use, with * for any text; default: all

    [cache]
    share = "all"                  # of all tenants; default: "tenant"
"""

import hashlib
import hmac
import json
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from attrs import Factory, field, frozen

from minfer.effects.live.input_processing.input_processor import MAX_CLIENT_CHARS
from minfer.values.checks import MAX_PRIORITY, ConfigError

_FIELDS: Final = {"name", "key", "priority", "tenant", "admin", "adapters"}
_TABLES: Final = {"keys", "cache"}  # of a file
_SHARE_VALUES: Final = ("tenant", "all")
_COMMAND_LINE_TENANT: Final = ""  # the tenant of its keys; those of files have names
_REMOVED_FIELDS: Final = ("requests_per_minute", "tokens_per_minute")


@frozen(eq=False)
class ApiKey:
    """One key's owner. The key is stored as a digest. All keys of one tenant share a
    prefix cache.
    """

    name: str
    digest: bytes = field(repr=False)
    priority: int | None = None  # of all its requests; None: as each requests
    tenant: str = field(default=Factory(lambda self: self.name, takes_self=True))
    admin: bool = False  # may reset the prefix cache of all, and load adapters
    # Patterns of the names of adapters that it may use; None: all.
    adapters: tuple[str, ...] | None = None

    def may_use(self, adapter: str) -> bool:
        """Whether it may use an adapter of this name, if there is one."""
        patterns = self.adapters
        return patterns is None or any(fnmatchcase(adapter, each) for each in patterns)


def digest(key: bytes) -> bytes:
    """The digest of a key, which is stored in its place."""
    return hashlib.sha256(key).digest()


@frozen
class ApiKeys:
    """All keys; none: no key is needed."""

    known: Sequence[ApiKey] = ()
    share_all: bool = False  # the prefix cache is shared by all tenants

    def owner(self, sent_key: bytes) -> ApiKey | None:
        """The owner of a key, in a time that does not reveal how much of it is right."""
        sent_digest, owner = digest(sent_key), None
        for key in self.known:
            if hmac.compare_digest(sent_digest, key.digest):
                owner = key
        return owner


def read_keys(plain: Iterable[str], path: Path | None) -> ApiKeys:
    """The keys of the command line, and those of a file. Raises ConfigError."""
    plain_keys = [key for key in plain if key]
    is_numbered = len(plain_keys) > 1
    keys = [
        ApiKey(
            f"key-{i}" if is_numbered else "key",
            digest(key.encode()),
            tenant=_COMMAND_LINE_TENANT,
        )
        for i, key in enumerate(plain_keys, 1)
    ]
    share_all = False
    if path is not None:
        content = _read_file(path)
        entries = enumerate(_key_entries(content, path), 1)
        keys += [_read_key(key, f"{path}: key {i}") for i, key in entries]
        share_all = _shares_all(content, path)
    for kind, values in (
        ("names", [key.name for key in keys]),
        ("keys", [key.digest for key in keys]),
    ):
        if len(set(values)) < len(values):
            raise ConfigError(f"{kind} of API keys must differ; two are the same")
    return ApiKeys(tuple(keys), share_all)


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no API keys can be read: {error}") from None


def _key_entries(content: Any, path: Path) -> list[Any]:
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: there must be a list of API keys, named keys")
    return entries


def _shares_all(content: Any, path: Path) -> bool:
    """Whether a file shares the prefix cache between all tenants."""
    if not isinstance(content, dict):
        return False
    if unknown := content.keys() - _TABLES:
        raise ConfigError(f"{path} has no table {min(unknown)!r}; it has keys and cache")
    cache = content.get("cache", {})
    if not isinstance(cache, dict) or cache.keys() - {"share"}:
        raise ConfigError(f"{path}: cache must be a table with the field share alone")
    share = cache.get("share", "tenant")
    if share not in _SHARE_VALUES:
        raise ConfigError(f'{path}: share of cache must be "tenant" or "all"')
    return bool(share == "all")


def _read_key(entry: Any, location: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{location} must be a table with name and key")
    for name in _REMOVED_FIELDS:
        if name in entry:
            reason = "rate limits were removed; a gateway before the server can have them"
            raise ConfigError(f"{location} has a field {name}: {reason}")
    if unknown := entry.keys() - _FIELDS:
        field_list = ", ".join(sorted(_FIELDS))
        raise ConfigError(
            f"{location} has no field {min(unknown)!r}; it has {field_list}"
        )
    name, key = (_text_field(entry, field, location) for field in ("name", "key"))
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"{location}: admin must be true or false")
    if len(name) > MAX_CLIENT_CHARS:
        raise ConfigError(
            f"{location}: name must have at most {MAX_CLIENT_CHARS} characters"
        )
    return ApiKey(
        name=name,
        digest=digest(key.encode()),
        priority=_whole_number(
            entry, "priority", location, 1 - MAX_PRIORITY, MAX_PRIORITY - 1
        ),
        tenant=_text_field(entry, "tenant", location) if "tenant" in entry else name,
        admin=admin,
        adapters=_adapter_patterns(entry, location),
    )


def _adapter_patterns(entry: dict[str, Any], location: str) -> tuple[str, ...] | None:
    patterns = entry.get("adapters")
    if patterns is None:
        return None
    if not isinstance(patterns, list) or not all(
        isinstance(pattern, str) and pattern for pattern in patterns
    ):
        raise ConfigError(f"{location}: adapters must be a list of names or patterns")
    return tuple(patterns)


def _text_field(entry: dict[str, Any], name: str, location: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{location}: {name} must be a text that is not empty")
    return value


def _whole_number(
    entry: dict[str, Any], name: str, location: str, low: int, high: int
) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(
            f"{location}: {name} must be a whole number from {low} to {high}"
        )
    return value
