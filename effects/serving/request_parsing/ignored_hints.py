"""Hints of a request that have no effect here.

An unsupported field that would change an answer is refused with an error that names it.
A field that the API's documentation calls a hint or metadata is accepted: its name is in
the response header `x-minfer-ignored`, and once in the log. Parsers of a body call
`note_ignored`; `prepare` and `answer` of `input_workers.task` collect the names.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Final

_MAX_LOGGED_NAMES: Final = 1024  # that are logged only once
_log: Final = logging.getLogger("minfer.ignored")


class IgnoredHints:
    """The names of one request's ignored fields, in order and without repetitions."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Add a name."""
        self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names so far."""
        return tuple(self._names)


_current: Final[ContextVar[IgnoredHints | None]] = ContextVar("ignored", default=None)


@contextmanager
def collect_ignored() -> Iterator[IgnoredHints]:
    """Collect the hints that are noted in this block, by this thread or task."""
    hints = IgnoredHints()
    token = _current.set(hints)
    try:
        yield hints
    finally:
        _current.reset(token)


def note_ignored(name: str) -> None:
    """Note a field that was sent and has no effect, such as `cache_control`. The name is
    one of the API's: never a client's text, which could break the header.
    """
    if (hints := _current.get()) is not None:
        hints.add(name)


def log_ignored(names: Iterable[str]) -> None:
    """Log each name, once in this process."""
    for name in names:
        _log_once(name)


@lru_cache(maxsize=_MAX_LOGGED_NAMES)
def _log_once(name: str) -> None:
    _log.warning(
        "%s has no effect here and is ignored; the response header x-minfer-ignored "
        "names it in each answer",
        name,
    )
