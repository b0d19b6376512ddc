"""The error of a scheduling policy that broke a law, with the story that led to it.

A story has the arrivals, cancels and reasons of each turn. Reports that differ in their
ids alone are one line, and so are turns that differ in numbers alone; of a story that is
still long, the middle is left out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Submit
from minfer.records.state import Turn

MAX_LINES: Final = 36  # of turns, in a message
_LAST_LINES: Final = 14  # of them after those that are left out
_MAX_VALUE: Final = 60  # characters of a field
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


@frozen
class Flaw:
    """A law that was broken, how, and by which method's answer, if that is known."""

    law: str
    detail: str
    method: str = ""


class PolicyError(AssertionError):
    """A policy broke a law: `law` is its name; `turns` under `config` led to it.

    `method` is the policy's method at fault; empty if the kit could not tell. There is no
    `config` if the story was lost with its process.
    """

    def __init__(
        self,
        law: str,
        detail: str,
        config: EngineConfig | None,
        turns: Iterable[Turn],
        method: str = "",
    ) -> None:
        self.law, self.detail = law, detail.removeprefix(f"{law}: ")
        self.config, self.turns, self.method = config, tuple(turns), method
        lines = [f"{law}: {self.detail}"]
        if method:
            lines.append(f"method at fault: {method}")
        if config is not None:
            lines += [f"under {config}, after", *story(self.turns)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> Any:
        args = self.law, self.detail, self.config, self.turns, self.method
        return type(self), args

    def of_method(self, method: str) -> "PolicyError":
        """The same error with the method at fault."""
        return type(self)(self.law, self.detail, self.config, self.turns, method)


def story(turns: Sequence[Turn]) -> list[str]:
    """The lines of a story, at most `MAX_LINES`."""
    told = [(turn, lines) for turn in turns if (lines := _lines_of(turn))]
    alike = groupby(told, key=lambda entry: _NUMBER.sub("#", "\n".join(entry[1])))
    return shortened([line for _, group in alike for line in _turns_alike([*group])])


def shortened(lines: list[str]) -> list[str]:
    """At most `MAX_LINES` of the lines: the first and the last."""
    if len(lines) <= MAX_LINES:
        return lines
    first, num_left_out = MAX_LINES - _LAST_LINES - 1, len(lines) - MAX_LINES + 1
    left_out = f"  ({num_left_out} lines left out; the error's attributes have all)"
    return [*lines[:first], left_out, *lines[-_LAST_LINES:]]


def _turns_alike(turns: list[tuple[Turn, list[str]]]) -> Iterator[str]:
    """The lines of turns that differ in numbers alone: those of the first, or of all if
    they are two.
    """
    if len(turns) > 2:
        last, _ = turns[-1]
        until = f"turn {last.number}, {last.transition.state.time:.4f} s"
        yield f"  {len(turns)} turns alike, until {until}; the first:"
        turns = turns[:1]
    for turn, lines in turns:
        heading = f"  turn {turn.number}, {turn.transition.state.time:.4f} s: "
        yield from (heading + line for line in lines)


def _lines_of(turn: Turn) -> list[str]:
    """The reports of a turn; those alike but for their ids are one line."""
    inputs = (event for event in turn.events if isinstance(event, Submit | Cancel))
    reports = [
        _report(report.request if isinstance(report, Submit) else report)
        for report in (*inputs, *turn.transition.reasons)
    ]
    lines = []
    for (kind, fields), group in groupby(reports, key=lambda report: report[::2]):
        ids = [request_id for _, request_id, _ in group]
        several = f" to {ids[-1]} ({len(ids)} alike)" if len(ids) > 1 else ""
        shown = f" id={ids[0]}{several}" if ids[0] is not None else several
        lines.append(f"{kind}{shown}{fields}")
    return lines


def _report(record: Any) -> tuple[str, Any, str]:
    """The class of a record, its id if it has one, and its other fields, without those
    that are as by default.
    """
    fields = "".join(
        f" {field.name}={_shown(value)}"
        for field in attrs.fields(type(record))
        if field.init
        and field.name != "id"
        and (value := getattr(record, field.name)) != field.default
    )
    return type(record).__name__, getattr(record, "id", None), fields


def record_line(record: Any) -> str:
    """A record on one line, without the fields that are as by default."""
    kind, request_id, fields = _report(record)
    return f"{kind}{'' if request_id is None else f' id={request_id}'}{fields}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], bytes):  # keys
        value = [key.hex()[:6] for key in value]
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _MAX_VALUE:
        return text
    length = f"; {len(value)} in all" if hasattr(value, "__len__") else ""
    return f"{text[:_MAX_VALUE]}...{length}"
