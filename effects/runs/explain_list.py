"""`minfer explain FILE` without a request: the requests of runs, by id.

The rounds of a beam search are one request here.

A fold over turns: for each request its arrival, and for its samples the first token, the
last message, and the finish reason. To find a request to explain, look for the slow ones.
"""

from collections.abc import Iterable, Iterator
from itertools import compress, groupby
from typing import Any, Final

from attrs import asdict, define

from minfer.records.messages import Emit, Submit
from minfer.records.state import Turn

SHOWN: Final = 50  # requests that are listed for people: the latest
_LINE: Final = (
    "{name:<40} {arrived:>12} {prompt:>8} {tokens:>8} {first:>12} {took:>12}  {end}"
)


@define
class ListedRequest:
    """A request, and its results. Times are in seconds, lengths in tokens."""

    id: str
    arrived: float  # from the first turn on
    prompt: int
    tokens: int = 0  # of all its samples
    first: float | None = None  # from its arrival to the first token of any sample
    took: float | None = None  # from its arrival to its latest end
    end: str = "goes on"  # or why its last sample ended
    run: str = ""  # its run
    machine: str = ""  # of its engine, if that is known


def list_requests(
    turns: Iterable[Turn], run: str = "", machine: str = ""
) -> list[ListedRequest]:
    """All requests that came in some turns of a run, in that order; of one id, the
    latest, and of a search its rounds as one.
    """
    found: dict[str, ListedRequest] = {}
    begin: float | None = None
    for turn in turns:
        now = turn.transition.state.time
        begin = now if begin is None else begin
        now -= begin
        for event in turn.events:
            if isinstance(event, Submit):
                one = event.request
                search = one.continuation.beam_round
                if search is not None and search.number and search.id in found:
                    found[one.id] = found[search.id]
                    continue
                name = one.id if search is None else search.id
                found.pop(name, None)
                found[name] = found[one.id] = ListedRequest(
                    name, now, len(one.prompt), run=run, machine=machine
                )
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                _note_outputs(command, now, found)
    return [one for name, one in found.items() if name == one.id]


def _note_outputs(emit: Emit, now: float, found: dict[str, ListedRequest]) -> None:
    for name, _ in compress(emit.ids, emit.tokens):
        one = found.get(name)  # it may have come before the first turn
        if one is not None and one.first is None:
            one.first = now - one.arrived
    for done in emit.finished:
        one = found.get(done.id)
        if one is not None:
            one.tokens += done.length
            one.took = now - one.arrived
            one.end = done.reason


def figures(every: Iterable[ListedRequest]) -> list[dict[str, Any]]:
    """The list as JSON values."""
    return [asdict(one) for one in every]


def lines(every: list[ListedRequest], source: str) -> Iterator[str]:
    """The list for people; runs are named where there are several."""
    runs = list(dict.fromkeys(one.run for one in every))
    shown = every[-SHOWN:]
    which = "" if shown == every else f"; the latest {len(shown)} (--json has all)"
    of = f", of {len(runs)} runs" if len(runs) > 1 else ""
    yield f"{len(every):,} requests in {source}{of}{which}"
    yield _LINE.format(
        name="id",
        arrived="came at, s",
        prompt="prompt",
        tokens="written",
        first="first, ms",
        took="took, ms",
        end="ended",
    )
    for (run, machine), requests in groupby(shown, lambda one: (one.run, one.machine)):
        if len(runs) > 1:
            yield f"run {run}" + (f" on {machine}" if machine else "")
        yield from map(_row, requests)
    yield f"minfer explain {source} ID says where the time of one of them went"
    yield "an answer's own id will do: here it has the number of its prompt behind it"


def _row(one: ListedRequest) -> str:
    return _LINE.format(
        name=one.id if one.id.isprintable() else repr(one.id),
        arrived=f"{one.arrived:,.3f}",
        prompt=f"{one.prompt:,}",
        tokens=f"{one.tokens:,}",
        first=_ms(one.first),
        took=_ms(one.took),
        end=one.end,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
