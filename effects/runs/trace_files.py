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
from minfer.effects.runs.arrivals import MAX_TOKENS, ArrivalTrace, TraceError, TraceRow
from minfer.effects.runs.recorded import latest
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Emit, FetchBlocks, Moved, Submit
from minfer.records.sequence import SampleId
from minfer.records.state import Turn
from minfer.simulation.guesses_recorded import RecordedDrafts
from minfer.simulation.simulate import Arrival
from minfer.values.checks import MAX_INT64

GENERATED: Final = "poisson:"  # how a trace that is spelled out begins
TOKENS_PER_HASH_ID: Final = 512  # tokens of a prompt for each of Mooncake's hash ids
AZURE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
TRACE_FORMATS: Final = (
    f"a trace is Azure's CSV ({AZURE}), Mooncake's JSON lines (timestamp, input_length, "
    "output_length, hash_ids), a journal of minfer, or spelled out as in poisson:rate=4,"
    "requests=1000,prompt=512,output=128,spread=0.8,shared=0.5,prefix=256,prefixes=4,seed=0"
)


@frozen
class _Parameter:
    """A number of a trace that is written as parameters."""

    default: float
    minimum: float
    maximum: float


_PARAMETERS: Final = {
    "rate": _Parameter(1.0, 1e-6, 1e6),
    "requests": _Parameter(1000, 1, MAX_TOKENS),
    "prompt": _Parameter(512, 1, MAX_TOKENS),
    "output": _Parameter(128, 1, MAX_TOKENS),
    "spread": _Parameter(0.0, 0, 8),
    "shared": _Parameter(0.0, 0, 1),
    "prefix": _Parameter(256, 1, MAX_TOKENS),
    "prefixes": _Parameter(1, 1, MAX_TOKENS),
    "seed": _Parameter(0, 0, MAX_INT64),
}


def seed_of(source: str) -> int | None:
    """The seed that a distribution gives, None if it gives none or for another trace.
    Raises TraceError.
    """
    settings = source.removeprefix(GENERATED).split(",")
    if not source.startswith(GENERATED):
        return None
    if not any(setting.startswith("seed=") for setting in settings):
        return None
    seed: int = _read_parameters(source)["seed"]
    return seed


def read_trace(
    source: str, max_requests: int | None = None, divide: int = 1
) -> ArrivalTrace:
    """The first `max_requests` requests of a trace, all of them checked, lengths divided
    by `divide`.

    Raises TraceError, and JournalError for a journal that cannot be read.
    """
    path = Path(source)
    generated = source.startswith(GENERATED)
    first = b"" if generated else _first_line(path)
    if first.startswith(b"minfer journal"):
        if divide > 1:
            raise TraceError(f"{source}: the prompts of a journal cannot be divided")
        return _journal(path, max_requests)
    if generated:
        all_rows = _poisson(source)
    elif first == AZURE.encode() or first.startswith(b"{"):
        all_rows = _rows(path, first == AZURE.encode())
    else:
        raise TraceError(f"{source}: row 1 is of no known format; {TRACE_FORMATS}")
    rows = list(islice(all_rows, max_requests))
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
        raise TraceError(f"{path}: {error.strerror}; {TRACE_FORMATS}") from None


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
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise TraceError(f"{path}, row {number}: {reason}") from None


def _check(is_valid: bool, reason: str) -> None:
    if not is_valid:
        raise ValueError(reason)


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
    enough = len(ids) == -(-prompt // TOKENS_PER_HASH_ID)
    _check(enough, f"{len(ids)} hash_ids of {TOKENS_PER_HASH_ID} for {prompt} tokens")
    fit = all(type(hash_id) is int and 0 <= hash_id < 2**31 for hash_id in ids)
    _check(fit, "hash_ids must be whole numbers from 0 to 2^31 - 1")
    return TraceRow(
        float(parameters["timestamp"]) / 1000, prompt, output, ids, TOKENS_PER_HASH_ID
    )


def _tokens(name: str, value: str | int, low: int = 1) -> int:
    is_valid = type(value) in (str, int) and low <= int(value) <= MAX_TOKENS
    _check(
        is_valid,
        f"{name} must be a whole number from {low} to {MAX_TOKENS}, not {value!r}",
    )
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
        ids, span, min_prompt = [prefixes + number], MAX_TOKENS, 1
        if rng.random() < parameters["shared"]:
            span, min_prompt = parameters["prefix"], parameters["prefix"] + 1
            ids.insert(0, rng.randrange(prefixes))
        yield TraceRow(time, max(min_prompt, prompt), max(1, output), tuple(ids), span)
        time += rng.expovariate(parameters["rate"])


def _read_parameters(source: str) -> dict[str, Any]:
    """The parameters of a trace that is written as such. Raises TraceError."""
    parameters: dict[str, Any] = {
        name: parameter.default for name, parameter in _PARAMETERS.items()
    }
    for setting in filter(None, source.removeprefix(GENERATED).split(",")):
        name, _, value = setting.partition("=")
        try:
            parameters[name] = type(parameters[name])(value)
            fits = (
                _PARAMETERS[name].minimum <= parameters[name] <= _PARAMETERS[name].maximum
            )
            _check(fits, "out of range")
        except (KeyError, ValueError):
            ranges = (
                f"{name} ({parameter.minimum:g} to {parameter.maximum:g})"
                for name, parameter in _PARAMETERS.items()
            )
            reason = f"{setting!r} is none of {', '.join(ranges)}"
            raise TraceError(f"{source}: {reason}") from None
    return parameters


def _length(rng: Random, mean: float, spread: float) -> int:
    """A length around a mean, in tokens."""
    return round(
        min(MAX_TOKENS, rng.lognormvariate(math.log(mean) - spread**2 / 2, spread))
    )


def _journal(path: Path, max_requests: int | None) -> ArrivalTrace:
    """The arrivals of a journal; requests that were there before its first turn are left
    out.
    """
    journal, events = latest(path).open(), list[Arrival]()
    lengths = dict[SampleId, int]()
    stops = frozenset((1,))  # a text may have ended without a stop id
    num_requests = 0
    drafts, fetches = RecordedDrafts(journal.config), _Fetches()
    for turn in journal.turns():
        drafts.add_turn(turn)
        fetches.see(turn)
        now = turn.transition.state.time
        for event in turn.events:
            if isinstance(event, Cancel):
                events.append((now, event))
            elif isinstance(event, Submit):
                num_requests += 1
                request = event.request
                if not max_requests or num_requests <= max_requests:
                    events.append(
                        (now, evolve(request, stop_ids=request.stop_ids or stops))
                    )
        emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
        for finished in (finished for emit in emits for finished in emit.finished):
            if finished.reason not in ("cancelled", "rejected", "error"):
                lengths[finished.id, finished.sample] = finished.length
    if not num_requests:
        raise TraceError(f"{path}: no request came while it was written")
    moved = tuple((time - events[0][0], event) for time, event in events)
    return ArrivalTrace(
        events=moved,
        config=fetches.priced(journal.config),
        lengths=lengths,
        drafts=drafts,
    )


@define
class _Fetches:
    """The time of a run's transfers from its external store."""

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
        """The configuration with what a page took, if its external store has no costs:
        those of another engine are not measured beforehand.
        """
        store = config.external_store
        if store is None or store.page_seconds or not self.pages:
            return config
        costs = evolve(store, page_seconds=self.seconds / self.pages)
        return evolve(config, external_store=costs)
