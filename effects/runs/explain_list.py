"""`minfer explain FILE` without a request: the requests of runs, by id, those that waited
longest first.

The rounds of a beam search are one request here.

A fold over turns: for each request its arrival and waits, and for its samples the first
token, the last message, and the finish reason.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any, Final

from attrs import asdict, define, field

from minfer.analysis.queue_times import QueueFold, QueueTimes
from minfer.effects.live.request_names import answer_of
from minfer.effects.runs.explain_verdict import MIN_SHARE, is_overtaken
from minfer.effects.runs.explain_words import ORDER, cause_of
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Submit
from minfer.records.state import Turn
from minfer.values.texts import counted

MAX_LISTED: Final = 50  # requests that are listed for people
_LINE: Final = (
    "{name:<40} {arrived:>12} {prompt:>8} {tokens:>8} {first:>12} {took:>12} "
    "{waited:>12} {preempted:>9}  {end:<9} {cause}"
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
    lasted: float = 0.0  # the same, or to the end of the run
    end: str = "goes on"  # or why its last sample ended
    run: str = ""  # its run
    machine: str = ""  # of its engine, if that is known
    priority: int = 0
    # In the queue, over all its samples, and as `QueueTimes` has it.
    waits: dict[str, float] = field(factory=dict)  # seconds by cause
    preempted: int = 0
    preempted_for_later: int = 0
    admitted: int = 0
    later: int = 0
    hit: int = 0  # tokens of its prompt that were cached
    near: str = ""  # the request whose prefix it missed by one token, if there is one
    near_at: int = 0  # the place of that token
    near_end: int = 0  # up to which they are alike but for it
    shared: int = 0  # leading tokens of its prompt that another one has, too
    shared_with: str = ""

    @property
    def waited(self) -> float:
        """All its waits, in seconds."""
        return sum(self.waits.values())

    @property
    def cause(self) -> str:
        """What it waited for longest; empty if it did not wait."""
        if self.is_overtaken:
            return ORDER
        longest = max(self.waits, key=lambda cause: self.waits[cause], default="")
        return longest if self.waits.get(longest) else ""

    @property
    def is_overtaken(self) -> bool:
        """Whether it waited a good part of its time as later ones went first."""
        is_long = self.waited > 0 and self.waited >= MIN_SHARE * self.lasted
        return is_long and is_overtaken(
            self.later, self.admitted, self.preempted_for_later
        )

    def add(self, times: QueueTimes) -> None:
        """Add the waits of a request, or of one of its rounds."""
        for cause, seconds in times.seconds.items():
            self.waits[cause] = self.waits.get(cause, 0.0) + seconds
        self.preempted += times.preempted
        self.preempted_for_later += times.preempted_for_later
        self.admitted += times.admitted
        self.later += times.later
        self.hit = times.hit
        self.shared, self.shared_with = times.shared, times.shared_with
        if times.edit is not None:
            self.near, self.near_at = times.edit_with, times.edit.at
            end = times.edit.end
            self.near_end = min(end, times.prompt - 1)


def list_requests(
    config: EngineConfig, turns: Iterable[Turn], run: str = "", machine: str = ""
) -> list[ListedRequest]:
    """All requests that came in some turns of a run, in that order; of one id, the
    latest, and of a search its rounds as one.
    """
    by_id: dict[str, ListedRequest] = {}
    begin: float | None = None
    last = 0.0
    queue = QueueFold(config)
    for turn in turns:
        queue.turn(turn)
        now = turn.transition.state.time
        begin = now if begin is None else begin
        now -= begin
        last = now
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
                    name,
                    now,
                    len(request.prompt),
                    run=run,
                    machine=machine,
                    priority=request.priority,
                )
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                _note_outputs(command, now, by_id)
    for listed in by_id.values():
        listed.lasted = last - listed.arrived if listed.took is None else listed.took
    for name, times in queue.end().items():
        if name in by_id:
            by_id[name].add(times)
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
    return [
        {**asdict(request), "waited": request.waited, "cause": request.cause}
        for request in requests
    ]


def by_wait(request: ListedRequest) -> tuple[float, int, float]:
    """Orders requests: longest waits first, then most preemptions, then most time."""
    return -request.waited, -request.preempted, -(request.took or 0.0)


def by_time(request: ListedRequest) -> float:
    """Orders requests: those that took longest first; those that go on before all."""
    return -math.inf if request.took is None else -request.took


def lines(
    listed: list[ListedRequest], source: str, slowest: int | None = None
) -> Iterator[str]:
    """The list for people: the `slowest`, or those that waited longest; runs are named
    where there are several.
    """
    runs = list(dict.fromkeys(request.run for request in listed))
    order = by_wait if slowest is None else by_time
    shown = sorted(listed, key=order)[: MAX_LISTED if slowest is None else slowest]
    what = "that waited longest" if slowest is None else "that took longest"
    which = "" if len(shown) == len(listed) else f"; the {len(shown)} {what}"
    hint = " (--json has all)" if which and slowest is None else ""
    of_runs = f", of {len(runs)} runs" if len(runs) > 1 else ""
    yield f"{counted(len(listed), 'request')} in {source}{of_runs}{which}{hint}"
    yield _LINE.format(
        name="id",
        arrived="came at, s",
        prompt="prompt",
        tokens="written",
        first="first, ms",
        took="took, ms",
        waited="waited, ms",
        preempted="preempted",
        end="ended",
        cause="waited mostly for",
    )
    for run in runs:
        requests = [request for request in shown if request.run == run]
        if len(runs) > 1 and requests:
            machine = requests[0].machine
            yield f"run {run}" + (f" on {machine}" if machine else "")
        yield from map(_row, requests)
    yield f"minfer explain {source} ID says where the time of one of them went"
    numbered = next((r.id for r in shown if answer_of(r.id) != r.id), None)
    if numbered is not None:  # a server numbers the prompts of an answer
        answer = answer_of(numbered)
        yield f"ID may also be that of an answer: {answer!r} for {numbered!r}"


def _row(request: ListedRequest) -> str:
    cause = request.cause
    return _LINE.format(
        name=request.id if request.id.isprintable() else repr(request.id),
        arrived=f"{request.arrived:,.3f}",
        prompt=f"{request.prompt:,}",
        tokens=f"{request.tokens:,}",
        first=_ms(request.first),
        took=_ms(request.took),
        waited=_ms(request.waited),
        preempted=f"{request.preempted:,}",
        end=request.end,
        cause=cause_of(cause).waited_for.format(cause=cause) if cause else "",
    ).rstrip()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
