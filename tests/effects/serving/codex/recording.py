"""Requests of a program: recorded, and kept without their prose.

A recording has the structure, the names of fields and the lengths of texts of what a
program sent. A text that is prose is `~` and its length; `filled` makes texts of these
again, equal ones for equal places.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tests.effects.served import Serving

_MARK: Final = "~"
# Fields whose texts are the API's or the test's own.
_KEPT: Final = frozenset(
    {
        *("type", "role", "name", "namespace", "status", "call_id", "arguments"),
        *("tool_choice", "model", "include", "required", "enum", "syntax", "effort"),
        *("summary", "execution", "context", "verbosity", "search_content_types"),
    }
)
_WORDS: Final = "filler text of a recorded request, whose own words are left out. "


@frozen
class Recording:
    """The requests of a session: each has the items of the one before, and more."""

    fields: Mapping[str, Any]  # of each request, but its input
    items: Sequence[Any]
    counts: Sequence[int]  # items of each request
    texts: Sequence[str]  # that the model wrote

    @classmethod
    def of(cls, bodies: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> "Recording":
        """The recording of these requests."""
        items = bodies[-1]["input"]
        for body in bodies:
            assert body["input"] == items[: len(body["input"])]
            assert body["tools"] == bodies[0]["tools"]
        fields = {name: value for name, value in bodies[0].items() if name != "input"}
        counts = [len(body["input"]) for body in bodies]
        return cls(without_prose(fields), without_prose(items), counts, texts)

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        fields = {name: getattr(self, name) for name in _NAMES}
        path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """The recording in a file."""
        return cls(**json.loads(path.read_text()))

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The requests, with texts of their lengths."""
        fields, items = filled(self.fields), filled(self.items)
        for count in self.counts:
            yield {**fields, "input": items[:count]}


_NAMES: Final = ("fields", "items", "counts", "texts")


def without_prose(value: Any, name: str = "") -> Any:
    """A value whose texts are replaced by their lengths, but for names and kinds."""
    if isinstance(value, dict):
        return {
            key: without_prose(field_value, key) for key, field_value in value.items()
        }
    if isinstance(value, list):
        return [without_prose(item, name) for item in value]
    if isinstance(value, str) and name not in _KEPT:
        return f"{_MARK}{len(value)}"
    return value


def filled(value: Any, place: str = "") -> Any:
    """A recorded value with texts of their lengths, which differ by their place."""
    if isinstance(value, dict):
        return {
            key: filled(field_value, f"{place}.{key}")
            for key, field_value in value.items()
        }
    if isinstance(value, list):
        return [filled(item, f"{place}.{index}") for index, item in enumerate(value)]
    if isinstance(value, str) and value.startswith(_MARK):
        length = int(value.removeprefix(_MARK))
        return (f"{place} " + _WORDS * (length // len(_WORDS) + 1))[:length]
    return value


@contextlib.contextmanager
def recorded(server: Serving) -> Iterator[list[dict[str, Any]]]:
    """The bodies that a server gets meanwhile."""
    receiver: Any = server.service.receiver
    receive = receiver._receive_body
    bodies: list[dict[str, Any]] = []

    async def keep(connection: Any) -> bytes:
        data: bytes = await receive(connection)
        bodies.append(json.loads(data))
        return data

    receiver._receive_body = keep
    try:
        yield bodies
    finally:
        receiver._receive_body = receive
