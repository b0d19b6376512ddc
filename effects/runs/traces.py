"""Arrival traces: who came when, with how long a prompt, and how much they were given.

Four kinds are read, and told apart by what is in them. But for journals there are no
texts: prompts are made up, and begin alike where a trace says so; `max_tokens` is the
length that came out.
"""

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.config import ConfigError, EngineConfig
from minfer.effects.live.journal_files import read_journal
from minfer.messages import Cancel, Emit, Submit
from minfer.request import Request
from minfer.runs.redact import redacted_config
from minfer.runs.simulate import Arrival
from minfer.sequence import SampleId

LONGEST: Final = 10_000_000  # tokens: a longer prompt or output is a mistake
SPAN: Final = 512  # tokens of a prompt that one of Mooncake's hash ids stands for
AZURE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
KNOWN: Final = (
    f"a trace is Azure's CSV ({AZURE}), Mooncake's JSON lines (timestamp, input_length, "
    "output_length, hash_ids), a journal of minfer, or spelled out as in poisson:rate=4,"
    "requests=1000,prompt=512,output=128,spread=0.8,shared=0.5,prefix=256,prefixes=4,seed=0"
)
_SPELLED: Final[dict[str, tuple[float, float, float]]] = {  # default, least and most
    "rate": (1.0, 1e-6, 1e6),
    "requests": (1000, 1, LONGEST),
    "prompt": (512, 1, LONGEST),
    "output": (128, 1, LONGEST),
    "spread": (0.0, 0, 8),
    "shared": (0.0, 0, 1),
    "prefix": (256, 1, LONGEST),
    "prefixes": (1, 1, LONGEST),
    "seed": (0, 0, 2**63),
}


class TraceError(ConfigError):
    """A trace that cannot be used: which, in which row, and why."""


@frozen
class Row:
    """One request of a trace. Requests with the same leading `ids` begin alike."""

    time: float  # seconds
    prompt: int  # tokens
    output: int  # tokens
    ids: tuple[
        int, ...
    ]  # each stands for `span` tokens and all before, the last for the rest
    span: int = LONGEST

    def request(self, name: str, block_size: int, **more: Any) -> Request:
        """The request; token ids and content keys are made up from `ids`: nothing is
        hashed.
        """
        ids, span, top = self.ids, self.span, len(self.ids) - 1
        prompt = tuple([one for one in ids[:-1] for _ in range(span)])
        prompt += (ids[-1],) * (self.prompt - len(prompt))
        ends = range(block_size, self.prompt + 1, block_size)
        keys = tuple([b"%d %d" % (ids[min((end - 1) // span, top)], end) for end in ends])
        return Request(id=name, prompt=prompt, max_tokens=self.output, keys=keys, **more)


@frozen
class Trace:
    """Arrivals in order of time, the first at 0: `rows`, or `events` as a journal has
    them.
    """

    rows: tuple[Row, ...] = ()
    events: tuple[Arrival, ...] = ()
    config: EngineConfig | None = None  # the journal's
    lengths: dict[SampleId, int] = field(
        factory=dict
    )  # output tokens, where not `max_tokens`

    @property
    def sizes(self) -> list[int]:
        """Tokens of each request, prompt and output."""
        asked = (what for _, what in self.events if isinstance(what, Request))
        sizes = [len(one.prompt) + one.max_tokens for one in asked]
        return sizes or [row.prompt + row.output for row in self.rows]

    def arrivals(
        self, block_size: int, speed: float = 1.0, mix: int | None = None
    ) -> Iterator[Arrival]:
        """What comes, `speed` times as fast, made as it is asked for.

        `mix` is a seed to draw from what rows do not say: 60% of all are one client's, a
        tenth is urgent, half want their first token within 1 s, half within 10 s. Raises
        TraceError if a journal without token ids cannot say which blocks of that size are
        equal.
        """
        # A simulation keeps no secrets.
        rng, more = Random(mix), dict[str, Any]()  # noqa: S311
        for number, row in enumerate(self.rows):
            if mix is not None:
                more["priority"] = -1 if rng.random() < 0.1 else 0
                more["client"] = (
                    "big" if rng.random() < 0.6 else rng.choice(("a", "b", "c"))
                )
                more["deadline"] = rng.choice((1.0, 10.0))
            yield row.time / speed, row.request(str(number), block_size, **more)
        size = self.config.block_size if self.config else block_size
        if (
            self.config
            and block_size % size
            and self.config == redacted_config(self.config)
        ):
            why = (
                f"without token ids equal blocks are known of {size} tokens and multiples"
            )
            raise TraceError(
                f"this journal cannot be simulated in blocks of {block_size}: {why}"
            )
        for time, what in self.events:
            if isinstance(what, Request) and block_size != size:
                yield time / speed, evolve(what, keys=())  # the engine makes its own
            else:
                yield time / speed, what


def read_trace(source: str, most: int | None = None, divide: int = 1) -> Trace:
    """The first `most` requests of a trace, all of them checked, lengths divided by
    `divide`.

    Raises TraceError, and JournalError for a journal that cannot be read.
    """
    path, first = Path(source), b""
    if source.startswith("poisson:"):
        found = _poisson(source)
    elif (first := _first_line(path)).startswith(b"minfer journal"):
        if divide > 1:
            raise TraceError(f"{source}: the prompts of a journal cannot be divided")
        return _journal(path, most)
    elif first == AZURE.encode() or first.startswith(b"{"):
        found = _rows(path, first == AZURE.encode())
    else:
        raise TraceError(f"{source}: row 1 is of no known format; {KNOWN}")
    rows = list(islice(found, most))
    if not rows:
        raise TraceError(f"{source}: there are no requests in it")
    begin = rows[0].time
    for at, row in enumerate(rows):
        prompt, span = max(1, row.prompt // divide), max(1, row.span // divide)
        output, ids = max(1, row.output // divide), row.ids[: -(-prompt // span)]
        rows[at] = Row(row.time - begin, prompt, output, ids, span)
    return Trace(tuple(rows))


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


def _rows(path: Path, azure: bool) -> Iterator[Row]:
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


def _azure(number: int, line: str) -> Row:
    cells = line.strip().split(",")
    _check(len(cells) == 3, f"it has {len(cells)} columns, not 3")
    moment = datetime.fromisoformat(cells[0])
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    prompt, output = (
        _tokens("ContextTokens", cells[1]),
        _tokens("GeneratedTokens", cells[2], 0),
    )
    return Row(moment.timestamp(), prompt, output, (number,))


def _mooncake(line: str) -> Row:
    told = json.loads(line)
    prompt, ids = _tokens("input_length", told["input_length"]), tuple(told["hash_ids"])
    output = _tokens("output_length", told["output_length"], 0)
    _check(
        len(ids) == -(-prompt // SPAN),
        f"{len(ids)} hash_ids of {SPAN} for {prompt} tokens",
    )
    fit = all(type(one) is int and 0 <= one < 2**31 for one in ids)
    _check(fit, "hash_ids must be whole numbers from 0 to 2^31 - 1")
    return Row(float(told["timestamp"]) / 1000, prompt, output, ids, SPAN)


def _tokens(name: str, value: str | int, low: int = 1) -> int:
    right = type(value) in (str, int) and low <= int(value) <= LONGEST
    _check(right, f"{name} must be a whole number from {low} to {LONGEST}, not {value!r}")
    return int(value)


def _poisson(source: str) -> Iterator[Row]:
    """Random arrivals, `rate` a second; lengths are log-normal around their means, with
    `spread`.

    The share `shared` of prompts begins with one of `prefixes` common prefixes.
    """
    told: dict[str, Any] = {name: default for name, (default, _, _) in _SPELLED.items()}
    for part in filter(None, source.removeprefix("poisson:").split(",")):
        name, _, value = part.partition("=")
        try:
            told[name] = type(told[name])(value)
            _check(_SPELLED[name][1] <= told[name] <= _SPELLED[name][2], "out of range")
        except (KeyError, ValueError):
            ranges = (
                f"{name} ({low:g} to {high:g})"
                for name, (_, low, high) in _SPELLED.items()
            )
            raise TraceError(
                f"{source}: {part!r} is none of {', '.join(ranges)}"
            ) from None
    rng, time, spread = Random(told["seed"]), 0.0, told["spread"]  # noqa: S311 - as above
    for number in range(told["requests"]):
        means = (math.log(told[name]) - spread**2 / 2 for name in ("prompt", "output"))
        drawn = [round(min(LONGEST, rng.lognormvariate(mean, spread))) for mean in means]
        ids, span, least = [told["prefixes"] + number], LONGEST, 1
        if rng.random() < told["shared"]:
            span, least = told["prefix"], told["prefix"] + 1
            ids.insert(0, rng.randrange(told["prefixes"]))
        yield Row(time, max(least, drawn[0]), max(1, drawn[1]), tuple(ids), span)
        time += rng.expovariate(told["rate"])


def _journal(path: Path, most: int | None) -> Trace:
    """What came while a journal was written; who was there before its first turn is left
    out.
    """
    journal, events, lengths = read_journal(path), list[Arrival](), dict[SampleId, int]()
    stops, came = frozenset((1,)), 0  # a text may have ended without a stop id
    for turn in journal.turns():
        now = turn.transition.state.time
        for event in turn.events:
            if isinstance(event, Cancel):
                events.append((now, event))
            elif isinstance(event, Submit) and (came := came + 1) <= (most or came):
                one = event.request
                events.append((now, evolve(one, stop_ids=one.stop_ids or stops)))
        emits = (
            command for command in turn.transition.commands if isinstance(command, Emit)
        )
        for done in (done for emit in emits for done in emit.finished):
            if done.reason not in ("cancelled", "rejected", "error"):
                lengths[done.id, done.sample] = done.length
    if not came:
        raise TraceError(f"{path}: no request came while it was written")
    moved = tuple((time - events[0][0], what) for time, what in events)
    return Trace((), moved, journal.config, lengths)
