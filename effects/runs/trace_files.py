"""Reading arrival traces.

There are four kinds, distinguished by their contents.
"""

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import define, evolve, field, frozen

from minfer.blocks.prefix import flattened
from minfer.effects.runs.arrivals import LONGEST, ArrivalTrace, TraceError, TraceRow
from minfer.effects.runs.recorded import latest
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Emit, FetchBlocks, Moved, Submit
from minfer.records.sequence import SampleId
from minfer.records.state import Turn
from minfer.simulation.guesses_recorded import Recorded
from minfer.simulation.simulate import Arrival
from minfer.values.checks import MAX_INT64

SPAN: Final = 512  # tokens of a prompt for each of Mooncake's hash ids
AZURE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
KNOWN: Final = (
    f"a trace is Azure's CSV ({AZURE}), Mooncake's JSON lines (timestamp, input_length, "
    "output_length, hash_ids), a journal of minfer, or spelled out as in poisson:rate=4,"
    "requests=1000,prompt=512,output=128,spread=0.8,shared=0.5,prefix=256,prefixes=4,seed=0"
)


@frozen
class _Parameter:
    """A number of a trace that is written as parameters."""

    default: float
    least: float
    most: float


_PARAMETERS: Final = {
    "rate": _Parameter(1.0, 1e-6, 1e6),
    "requests": _Parameter(1000, 1, LONGEST),
    "prompt": _Parameter(512, 1, LONGEST),
    "output": _Parameter(128, 1, LONGEST),
    "spread": _Parameter(0.0, 0, 8),
    "shared": _Parameter(0.0, 0, 1),
    "prefix": _Parameter(256, 1, LONGEST),
    "prefixes": _Parameter(1, 1, LONGEST),
    "seed": _Parameter(0, 0, MAX_INT64),
}


def read_trace(source: str, most: int | None = None, divide: int = 1) -> ArrivalTrace:
    """The first `most` requests of a trace, all of them checked, lengths divided by
    `divide`.

    Raises TraceError, and JournalError for a journal that cannot be read.
    """
    path = Path(source)
    generated = source.startswith("poisson:")
    first = b"" if generated else _first_line(path)
    if first.startswith(b"minfer journal"):
        if divide > 1:
            raise TraceError(f"{source}: the prompts of a journal cannot be divided")
        return _journal(path, most)
    if generated:
        found = _poisson(source)
    elif first == AZURE.encode() or first.startswith(b"{"):
        found = _rows(path, first == AZURE.encode())
    else:
        raise TraceError(f"{source}: row 1 is of no known format; {KNOWN}")
    rows = list(islice(found, most))
    if not rows:
        raise TraceError(f"{source}: there are no requests in it")
    begin = rows[0].time
    return ArrivalTrace(tuple(_divide_row(row, begin, divide) for row in rows))


def _divide_row(row: TraceRow, begin: float, divide: int) -> TraceRow:
    """A row with its lengths divided, in a trace that begins at a time."""
    prompt = max(1, row.prompt // divide)
    span = max(1, row.span // divide)
    return TraceRow(
        time=row.time - begin,
        prompt=prompt,
        output=max(1, row.output // divide),
        ids=row.ids[: -(-prompt // span)],
        span=span,
    )


def _first_line(path: Path) -> bytes:
    """The first line of a file; folders are journals."""
    try:
        if path.is_fifo():
            raise TraceError(
                f"{path}: a pipe cannot be read twice; write it to a file first"
            )
        with path.open("rb") as file:
            return file.readline(200).removeprefix(b"\xef\xbb\xbf").strip()
    except IsADirectoryError:
        return b"minfer journal"
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; {KNOWN}") from None


def _rows(path: Path, azure: bool) -> Iterator[TraceRow]:
    number, last = 1, -math.inf
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not azure or number > 1:
                    row = _azure(number, line) if azure else _mooncake(line)
                    _check(abs(row.time) < 2**40, f"its time is {row.time:g} s")
                    _check(last <= row.time, f"time goes back by {last - row.time:g} s")
                    last = row.time
                    yield row
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise TraceError(f"{path}, row {number}: {why}") from None


def _check(right: bool, why: str) -> None:
    if not right:
        raise ValueError(why)


def _azure(number: int, line: str) -> TraceRow:
    cells = line.strip().split(",")
    _check(len(cells) == 3, f"it has {len(cells)} columns, not 3")
    moment = datetime.fromisoformat(cells[0])
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    prompt = _tokens("ContextTokens", cells[1])
    output = _tokens("GeneratedTokens", cells[2], 0)
    return TraceRow(moment.timestamp(), prompt, output, ids=(number,))


def _mooncake(line: str) -> TraceRow:
    parameters = json.loads(line)
    prompt = _tokens("input_length", parameters["input_length"])
    ids = tuple(parameters["hash_ids"])
    output = _tokens("output_length", parameters["output_length"], 0)
    enough = len(ids) == -(-prompt // SPAN)
    _check(enough, f"{len(ids)} hash_ids of {SPAN} for {prompt} tokens")
    fit = all(type(one) is int and 0 <= one < 2**31 for one in ids)
    _check(fit, "hash_ids must be whole numbers from 0 to 2^31 - 1")
    return TraceRow(float(parameters["timestamp"]) / 1000, prompt, output, ids, SPAN)


def _tokens(name: str, value: str | int, low: int = 1) -> int:
    right = type(value) in (str, int) and low <= int(value) <= LONGEST
    _check(right, f"{name} must be a whole number from {low} to {LONGEST}, not {value!r}")
    return int(value)


def _poisson(source: str) -> Iterator[TraceRow]:
    """Random arrivals, `rate` a second; lengths are log-normal around their means, with
    `spread`.

    The share `shared` of prompts begins with one of `prefixes` common prefixes.
    """
    parameters, time = _read_parameters(source), 0.0
    spread, prefixes = parameters["spread"], parameters["prefixes"]
    rng = Random(parameters["seed"])  # noqa: S311 - a simulation keeps no secrets
    for number in range(parameters["requests"]):
        prompt = _length(rng, parameters["prompt"], spread)
        output = _length(rng, parameters["output"], spread)
        ids, span, least = [prefixes + number], LONGEST, 1
        if rng.random() < parameters["shared"]:
            span, least = parameters["prefix"], parameters["prefix"] + 1
            ids.insert(0, rng.randrange(prefixes))
        yield TraceRow(time, max(least, prompt), max(1, output), tuple(ids), span)
        time += rng.expovariate(parameters["rate"])


def _read_parameters(source: str) -> dict[str, Any]:
    """The parameters of a trace that is written as such. Raises TraceError."""
    parameters: dict[str, Any] = {name: one.default for name, one in _PARAMETERS.items()}
    for part in filter(None, source.removeprefix("poisson:").split(",")):
        name, _, value = part.partition("=")
        try:
            parameters[name] = type(parameters[name])(value)
            fits = _PARAMETERS[name].least <= parameters[name] <= _PARAMETERS[name].most
            _check(fits, "out of range")
        except (KeyError, ValueError):
            ranges = (
                f"{name} ({one.least:g} to {one.most:g})"
                for name, one in _PARAMETERS.items()
            )
            why = f"{part!r} is none of {', '.join(ranges)}"
            raise TraceError(f"{source}: {why}") from None
    return parameters


def _length(rng: Random, mean: float, spread: float) -> int:
    """A length around a mean, in tokens."""
    return round(min(LONGEST, rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def _journal(path: Path, most: int | None) -> ArrivalTrace:
    """The arrivals of a journal; requests that were there before its first turn are left
    out.
    """
    journal, events = latest(path).open(), list[Arrival]()
    lengths = dict[SampleId, int]()
    stops = frozenset((1,))  # a text may have ended without a stop id
    came = 0
    drafts, fetches = Recorded(journal.config), _Fetches()
    for turn in journal.turns():
        drafts.see(turn)
        fetches.see(turn)
        now = turn.transition.state.time
        for event in turn.events:
            if isinstance(event, Cancel):
                events.append((now, event))
            elif isinstance(event, Submit):
                came += 1
                one = event.request
                if not most or came <= most:
                    events.append((now, evolve(one, stop_ids=one.stop_ids or stops)))
        emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
        for done in (done for emit in emits for done in emit.finished):
            if done.reason not in ("cancelled", "rejected", "error"):
                lengths[done.id, done.sample] = done.length
    if not came:
        raise TraceError(f"{path}: no request came while it was written")
    moved = tuple((time - events[0][0], what) for time, what in events)
    return ArrivalTrace(
        events=moved,
        config=fetches.priced(journal.config),
        lengths=lengths,
        drafts=drafts,
    )


@define
class _Fetches:
    """The time of a run's transfers from its keyed tier."""

    begun: dict[int, tuple[float, int]] = field(factory=dict)  # since when, and pages
    seconds: float = 0.0
    pages: int = 0

    def see(self, turn: Turn) -> None:
        """Fold a turn."""
        now = turn.transition.state.time
        for event in turn.events:
            if isinstance(event, Moved) and event.number in self.begun:
                since, pages = self.begun.pop(event.number)
                self.seconds, self.pages = self.seconds + now - since, self.pages + pages
        for command in turn.transition.commands:
            if isinstance(command, FetchBlocks):
                self.begun[command.number] = now, len(flattened(command.pages))

    def priced(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what a page took, if its keyed tier has no costs: those
        of another engine are not measured beforehand.
        """
        keyed = config.keyed
        if keyed is None or keyed.page_seconds or not self.pages:
            return config
        costs = evolve(keyed, page_seconds=self.seconds / self.pages)
        return evolve(config, keyed=costs)
