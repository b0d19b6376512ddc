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

MAX_LISTED: Final = 50  # requests that are listed for people: the latest
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
    by_id: dict[str, ListedRequest] = {}
    begin: float | None = None
    for turn in turns:
        now = turn.transition.state.time
        begin = now if begin is None else begin
        now -= begin
        for event in turn.events:
            if isinstance(event, Submit):
                request = event.request
                search = request.continuation.beam_round
                if search is not None and search.number and search.id in by_id:
                    by_id[request.id] = by_id[search.id]
                    continue
                name = request.id if search is None else search.id
                by_id.pop(name, None)
                by_id[name] = by_id[request.id] = ListedRequest(
                    name, now, len(request.prompt), run=run, machine=machine
                )
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                _note_outputs(command, now, by_id)
    return [listed for name, listed in by_id.items() if name == listed.id]


def _note_outputs(emit: Emit, now: float, by_id: dict[str, ListedRequest]) -> None:
    for name, _ in compress(emit.ids, emit.tokens):
        listed = by_id.get(name)  # it may have come before the first turn
        if listed is not None and listed.first is None:
            listed.first = now - listed.arrived
    for finished in emit.finished:
        listed = by_id.get(finished.id)
        if listed is not None:
            listed.tokens += finished.length
            listed.took = now - listed.arrived
            listed.end = finished.reason


def figures(requests: Iterable[ListedRequest]) -> list[dict[str, Any]]:
    """The list as JSON values."""
    return [asdict(request) for request in requests]


def lines(listed: list[ListedRequest], source: str) -> Iterator[str]:
    """The list for people; runs are named where there are several."""
    runs = list(dict.fromkeys(request.run for request in listed))
    shown = listed[-MAX_LISTED:]
    which = "" if shown == listed else f"; the latest {len(shown)} (--json has all)"
    of_runs = f", of {len(runs)} runs" if len(runs) > 1 else ""
    yield f"{len(listed):,} requests in {source}{of_runs}{which}"
    yield _LINE.format(
        name="id",
        arrived="came at, s",
        prompt="prompt",
        tokens="written",
        first="first, ms",
        took="took, ms",
        end="ended",
    )
    for (run, machine), requests in groupby(
        shown, lambda request: (request.run, request.machine)
    ):
        if len(runs) > 1:
            yield f"run {run}" + (f" on {machine}" if machine else "")
        yield from map(_row, requests)
    yield f"minfer explain {source} ID says where the time of one of them went"
    yield "an answer's own id will do: here it has the number of its prompt behind it"


def _row(request: ListedRequest) -> str:
    return _LINE.format(
        name=request.id if request.id.isprintable() else repr(request.id),
        arrived=f"{request.arrived:,.3f}",
        prompt=f"{request.prompt:,}",
        tokens=f"{request.tokens:,}",
        first=_ms(request.first),
        took=_ms(request.took),
        end=request.end,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
