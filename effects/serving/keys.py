"""API keys: who may ask, for how much, and how urgently.

Keys come from the command line and from a file, JSON or TOML, with a table for each:

    [[keys]]
    name = "team-a"                # what the scheduler and the log know
    key = "sk-..."
    requests_per_minute = 600      # these three may be left out
    tokens_per_minute = 100000
    priority = -1

Limits are token buckets: a minute's worth may go at once, and comes back evenly. Tokens
are paid for when they are known: those of prompts before a request runs, those of outputs
at its end, for which a bucket may be overdrawn; whoever has overdrawn waits.

A bucket is one number, the time at which it will be full again: what is missing now comes
back by then. That number lies in memory that all fronts of a server share (`shared`), so
that a key has its limit once, however many fronts there are and whichever it talks to.
"""

import hashlib
import hmac
import json
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from minfer.effects.live.edge import MAX_CLIENT, MAX_PRIORITY
from minfer.effects.serving.shared import Cell, Cells
from minfer.setting import ConfigError

MINUTE: Final = 60.0  # seconds
ROUNDING: Final = 1e-6  # seconds: what is due sooner is there
MOST: Final = 2**53  # of anything a minute
_FIELDS: Final = {"name", "key", "requests_per_minute", "tokens_per_minute", "priority"}


@frozen
class Bucket:
    """So much a minute, of which a whole minute's worth may go at once."""

    size: int
    clock: Callable[[], float] = time.monotonic
    _full_at: Cell = field(factory=Cell)  # on the clock; in the past: it is full

    @property
    def level(self) -> float:
        """What is left; less than nothing, if it is overdrawn."""
        return self.size - self.full() * self.size / MINUTE

    def full(self) -> float:
        """Seconds until all of it is there again."""
        return max(0.0, self._full_at.read() - self.clock())

    def wait(self, amount: float) -> float:
        """Seconds until so much is there; more than a minute's worth needs a full one."""
        left_over = max(0.0, self.size - amount) * MINUTE / self.size
        missing = self.full() - left_over
        return missing if missing > ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take so much, whether it is there or not."""
        with self._full_at.locked():
            self._take(amount)

    def take_if_there(self, amount: float) -> float:
        """Take so much if it is there; else return the seconds until it will be."""
        with self._full_at.locked():
            if wait := self.wait(amount):
                return wait
            self._take(amount)
            return 0.0

    def _take(self, amount: float) -> None:
        begin = max(self.clock(), self._full_at.read())
        self._full_at.write(begin + amount * MINUTE / self.size)


@define(eq=False)
class Key:
    """One key's owner, and what is left of its limits. The key is kept as a digest."""

    name: str
    digest: bytes = field(repr=False)
    requests: Bucket | None = None
    tokens: Bucket | None = None
    priority: int | None = None  # of all its requests; None: as they say

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer tells of the limits, as OpenAI's do."""
        found: list[tuple[bytes, bytes]] = []
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                told = {
                    "limit": str(bucket.size),
                    "remaining": str(max(0, math.floor(bucket.level + ROUNDING))),
                    "reset": f"{bucket.full():.3f}s",
                }
                found += [
                    (f"x-ratelimit-{what}-{kind}".encode(), said.encode())
                    for what, said in told.items()
                ]
        return found


def digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


@frozen
class Keys:
    """All keys; none: everybody may ask."""

    known: Sequence[Key] = ()

    def owner(self, given: bytes) -> Key | None:
        """Whose key it is, in a time that tells nothing of how much of it is right."""
        sent, found = digest(given), None
        for one in self.known:
            if hmac.compare_digest(sent, one.digest):
                found = one
        return found


def read_keys(plain: Iterable[str], path: Path | None) -> Keys:
    """The keys of the command line, and those of a file. Raises ConfigError."""
    given = [one for one in plain if one]
    many = len(given) > 1
    found = [
        Key(f"key-{i}" if many else "key", digest(one.encode()))
        for i, one in enumerate(given, 1)
    ]
    if path is not None:
        entries = _entries(path)
        cells = Cells(2 * len(entries))
        found += [
            _key(one, f"{path}: key {i + 1}", Cell(cells, 2 * i), Cell(cells, 2 * i + 1))
            for i, one in enumerate(entries)
        ]
    for what, values in (
        ("names", [one.name for one in found]),
        ("keys", [one.digest for one in found]),
    ):
        if len(set(values)) < len(values):
            raise ConfigError(f"{what} of API keys must differ; two are the same")
    return Keys(tuple(found))


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            read: Any = tomllib.loads(text)
        else:
            read = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no API keys can be read: {error}") from None
    listed = read.get("keys") if isinstance(read, dict) else read
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: there must be a list of API keys, named keys")
    return listed


def _key(entry: Any, where: str, requests_cell: Cell, tokens_cell: Cell) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a table with name and key")
    if odd := entry.keys() - _FIELDS:
        has = ", ".join(sorted(_FIELDS))
        raise ConfigError(f"{where} has no field {min(odd)!r}; it has {has}")
    name, key = (_text(entry, field, where) for field in ("name", "key"))
    if len(name) > MAX_CLIENT:
        raise ConfigError(f"{where}: name must have at most {MAX_CLIENT} characters")
    requests = _whole(entry, "requests_per_minute", where, 1, MOST)
    tokens = _whole(entry, "tokens_per_minute", where, 1, MOST)
    return Key(
        name=name,
        digest=digest(key.encode()),
        requests=None if requests is None else Bucket(requests, full_at=requests_cell),
        tokens=None if tokens is None else Bucket(tokens, full_at=tokens_cell),
        priority=_whole(entry, "priority", where, 1 - MAX_PRIORITY, MAX_PRIORITY - 1),
    )


def _text(entry: dict[str, Any], name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{where}: {name} must be a text that is not empty")
    return value


def _whole(
    entry: dict[str, Any], name: str, where: str, low: int, high: int
) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{where}: {name} must be a whole number from {low} to {high}")
    return value
