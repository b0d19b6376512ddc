"""For `minfer explain`: the replica and machine where a request ran, and from the
journals of the API servers' routers, to which replicas it was sent, in order, and why.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from minfer.effects.live.journal.journal_files import RunFiles, content_of
from minfer.effects.live.journal.routing_journal_file import PREFILL_SUFFIX, SUFFIX
from minfer.effects.live.request_names import answer_of, search_of
from minfer.effects.runs.recorded import machine_of
from minfer.journal.format import JournalError
from minfer.journal.replay import Journal
from minfer.journal.routed_requests import (
    ENDED,
    LOST,
    MOVED,
    RoutedRequest,
    RoutedRequests,
)
from minfer.journal.routing_journal import RoutingJournal

_PREFILLED: Final = "prefilled"  # in place of ENDED, at a replica that only prefills
_ENDS: Final = {  # by how it left a replica, and whether its first token came from there
    (ENDED, False): "; it ended there, without a token",
    (LOST, False): "; the replica died or was cut off before a token of it came",
    (LOST, True): "; the replica died or was cut off while it ran there",
    (_PREFILLED, False): "; its prompt was computed there, or it ended",
    (MOVED, False): "; it was taken from there before a token of it came",
    (MOVED, True): "; it was taken from there while it ran",
}


def place_of(run: RunFiles, journal: Journal) -> dict[str, str]:
    """The replica and the machine of a run, each empty if it is not known."""
    return {"replica": run.replica, "machine": machine_of(journal)}


def place_lines(place: Mapping[str, str]) -> Iterator[str]:
    """A line with the results of `place_of`; none if neither is known."""
    phrases = [f"at replica {place['replica']}"] if place["replica"] else []
    phrases += [f"on machine {place['machine']}"] if place["machine"] else []
    if phrases:
        yield f"  {', '.join(phrases)}"


def routing_of(folder: Path, ids: Collection[str]) -> list[dict[str, Any]]:
    """The decisions of the routers of a folder about requests with these ids, or prompts
    of answers or beams of searches with them: for each time that one was sent, the name
    of the `router` and the fields of a RoutedRequest. A journal that cannot be read is
    named on standard error, and what comes before the error is used.
    """
    if not folder.is_dir() or not ids:
        return []
    written = [json.dumps(name)[1:-1].encode() for name in ids]
    decisions = list[dict[str, Any]]()
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        requests = RoutedRequests()
        try:
            data = bytes(content_of(file))
        except JournalError as error:
            print(f"minfer: {error}", file=sys.stderr)
            continue
        if not any(map(data.__contains__, written)):
            continue
        try:
            for turn in RoutingJournal(data).turns():
                requests.turn(turn)
        except JournalError as error:
            print(f"minfer: {file}: {error}", file=sys.stderr)
        decisions += [
            _figures(file.stem, request)
            for request in requests.all
            if _is_about(request, ids)
        ]
    return decisions


def _is_about(request: RoutedRequest, ids: Collection[str]) -> bool:
    """Whether it is one of these requests, a prompt of one of these answers, or a beam of
    a request that a router placed.
    """
    is_named = request.id in ids or answer_of(request.id) in ids
    return is_named or (request.placed is not None and search_of(request.id) in ids)


def _figures(router: str, request: RoutedRequest) -> dict[str, Any]:
    return {"router": router, **asdict(request)}


def routing_lines(
    routing: list[dict[str, Any]], places: Iterable[Mapping[str, str]]
) -> Iterator[str]:
    """Lines of text for the results of `routing_of`; `places` are results of `place_of`,
    from which the machines are taken.
    """
    machines = {place["replica"]: place["machine"] for place in places}
    named = ""
    for decision in routing:
        if named != (named := decision["router"]):
            yield f"Routed by {named}:"
        machine = machines.get(decision["replica"])
        target = f"replica {decision['replica']}" + (f" ({machine})" if machine else "")
        times = decision["deferred"]
        waited = f", after it was deferred {times:,} times" if times else ""
        reason = (
            _placement_reason(decision["placed"])
            if decision["placed"]
            else "sent there without a decision"
        )
        prefilled = decision["end"] == ENDED and named.endswith(PREFILL_SUFFIX)
        outcome = _PREFILLED if prefilled else decision["end"]
        end = _ENDS.get((outcome, decision["started"]), "")
        request = f"turn {decision['turn']:,}: {decision['id']!r}"
        yield f"  {request} to {target}{waited}: {reason}{end}"


def _placement_reason(placed: dict[str, Any]) -> str:
    """Why a replica was chosen, with its expected cost and those of the others."""
    words = str(placed["why"])
    if placed["override"]:
        words += f", as the policy {placed['override']}"
    if placed["seconds"] is not None:
        alternatives = [
            f"replica {o['replica']} {_ms(o['seconds'])}" for o in placed["alternatives"]
        ]
        words += f" {_ms(placed['seconds'])}"
        words += f" (else {', '.join(alternatives)})" if alternatives else ""
    if placed["blocks"]:
        words += f", {placed['hit']:,} of {placed['blocks']:,} blocks were expected there"
    return words


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
