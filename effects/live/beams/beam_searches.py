"""The beam searches of an API server: it submits their rounds, and reports each search as
one request.

    API server --SearchRequest--> BeamSearches --rounds, ordinary requests--> engine
    client API server <--its outputs---- BeamSearches <-------their outputs---------
    engine client

The API server gets outputs of one request: its arrival, its first admission, its end and
the sequences. A round is submitted as soon as all beams of the round before have ended,
in the thread that gets the outputs.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from attrs import define, evolve, field, frozen

from minfer.effects.live.beams.beam_rounds import (
    SearchRequest,
    SearchRounds,
    candidates_of,
    round_requests,
)
from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    EngineMessage,
    RequestReason,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.request_registry import RequestStage
from minfer.effects.text.outputs import BeamFinished
from minfer.records.messages import Admitted, Finished, Preempted
from minfer.records.request import Continuation, Request
from minfer.sampling.beam import Candidates

T = TypeVar("T")
_NO_LOGPROBS_ERROR = "the model gave a beam no log-probabilities that can be compared"


@define(eq=False)
class LiveSearch:
    """A live search."""

    request: SearchRequest
    rounds: SearchRounds
    offers: dict[int, Candidates] = field(factory=dict)  # of this round, by beam
    names: set[str] = field(factory=set)  # of this round's requests that have not ended
    cached: int = 0  # prompt tokens from the prefix cache in the first round
    failed: Finished | None = None  # the first of its requests that did not end well
    cancelled: bool = False

    def fail(self, end: Finished) -> None:
        """Note the end of one of its requests that failed."""
        self.failed = self.failed or end


@frozen(eq=False)
class SearchBeam:
    """Where the outputs of a request go that is part of a search's round."""

    search: LiveSearch
    beam: int


class BeamSearches:
    """The searches of one API server. Methods may be called from any thread."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.RLock()
        self._requests = client.live
        self._searches: dict[str, LiveSearch] = {}  # by id
        self._beams: dict[str, SearchBeam] = {}  # by the ids of their requests

    @property
    def live(self) -> tuple[str, ...]:
        """The ids of live searches."""
        return (*self._searches,)

    def check(self, request: Request) -> None:
        """Raise the error with which a request would be refused now, as
        `EngineClient.check`: a search begins as one sample.
        """
        is_search = isinstance(request, SearchRequest)
        self._client.check(evolve(request, n=1) if is_search else request)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests, searches among them, as `EngineClient.submit`."""
        if not any(isinstance(request, SearchRequest) for request in requests):
            self._client.submit(requests)
            return
        with self._lock:
            for request in requests:
                self._requests.check_new(request)
            submitted = list[Request]()
            try:
                for request in requests:
                    if isinstance(request, SearchRequest):
                        submitted += self._begin(request)
                    else:
                        submitted.append(request)
                self._client.submit(submitted)
            except (EngineDeadError, RequestError):
                for request in requests:
                    self._forget(request.id)
                raise

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """End requests, as `EngineClient.cancel`; of searches, all their running
        requests.
        """
        with self._lock:
            # In the journal's order.
            by_id = {name: self._searches.get(name) for name in ids}
            searches = [search for search in by_id.values() if search is not None]
            names = dict.fromkeys(
                name for name, search in by_id.items() if search is None
            )
            for search in searches:
                search.cancelled = True
                names |= dict.fromkeys(sorted(search.names))
            served = self._client.cancel(names)
            served_searches = {
                search.request.id for search in searches if search.names & served
            }
            return frozenset(served & by_id.keys() | served_searches)

    def translate(self, message: EngineMessage) -> list[EngineMessage]:
        """Returns what an API server gets for a message of the engine."""
        if not self._searches:
            return [message]
        with self._lock:
            match message:
                case TurnOutputs():
                    return self._translate_outputs(message)
                case EngineDied():
                    return [self._translate_death(message)]

    def _begin(self, request: SearchRequest) -> tuple[Request, ...]:
        """Register a search; returns the requests of its first round."""
        record = self._requests.add(request)
        record.stage = RequestStage.SEARCHING
        search = LiveSearch(request, SearchRounds.of(request))
        self._searches[request.id] = search
        return self._next_round(search)

    def _next_round(self, search: LiveSearch) -> tuple[Request, ...]:
        """Register and return the requests of a search's next round."""
        search.rounds, requests = round_requests(search.rounds, search.request)
        search.offers = {}
        for beam, request in enumerate(requests):
            self._requests.add(request, read=True)
            self._beams[request.id] = SearchBeam(search, beam)
            search.names.add(request.id)
        return requests

    def _forget(self, name: str) -> None:
        """End a search, if it is one, and what is left of its round."""
        if (search := self._searches.pop(name, None)) is not None:
            for beam in search.names:
                self._release(beam)
            self._requests.end(name)

    def _release(self, beam: str) -> None:
        """Note that the outputs of a beam's request are not read any more."""
        self._beams.pop(beam, None)
        self._requests.release(beam)

    def _translate_death(self, death: EngineDied) -> EngineDied:
        """Returns a death with the ids of searches instead of their beams'."""
        beams = {name: self._beams.get(name) for name in death.ids}
        other_ids = [name for name, beam in beams.items() if beam is None]
        searches = [beam.search.request.id for beam in beams.values() if beam is not None]
        for name in self.live:
            self._forget(name)
        return EngineDied((*other_ids, *dict.fromkeys(searches)), death.reason)

    # --- outputs ------------------------------------------------------------------------

    def _translate_outputs(self, outputs: TurnOutputs) -> list[EngineMessage]:
        """Returns outputs without those of beams, and with those of their searches."""
        beams = {
            row: beam
            for row, (name, _) in enumerate(outputs.ids)
            if (beam := self._beams.get(name)) is not None
        }
        for row, beam in beams.items():
            logprobs = outputs.logprobs[row] if outputs.logprobs else ()
            if (offer := candidates_of(beam.beam, logprobs)) is not None:
                beam.search.offers[beam.beam] = offer
        reasons = self._translate_reasons(outputs)
        arrived = self._translate_arrivals(outputs)
        beam_ends = [end for end in outputs.finished if end.id in self._beams]
        finished = [end for end in outputs.finished if end.id not in self._beams]
        translated = evolve(
            outputs,
            ids=_without_rows(outputs.ids, beams),
            tokens=_without_rows(outputs.tokens, beams),
            logprobs=_without_rows(outputs.logprobs, beams),
            pooled=_without_rows(outputs.pooled, beams),
            drafts=_without_rows(outputs.drafts, beams),
            finished=tuple(finished),
            arrived=arrived,
            reasons=reasons,
        )
        if not beam_ends:
            return [translated]
        finished_searches, death = self._advance(beam_ends)
        for search in finished_searches:
            translated = _with_outputs(translated, search)
        return [translated, *([death] if death else [])]

    def _translate_reasons(self, outputs: TurnOutputs) -> tuple[RequestReason, ...]:
        """Returns reasons, with those of beams as their search's: its first admission,
        and preemptions.
        """
        reasons = list[RequestReason]()
        for reason in outputs.reasons:
            if (beam := self._beams.get(reason.id)) is None:
                reasons.append(reason)
            elif isinstance(reason, Preempted) or (
                isinstance(reason, Admitted) and not beam.search.rounds.next_round.number
            ):
                reasons.append(evolve(reason, id=beam.search.request.id, sample=0))
        return tuple(reasons)

    def _translate_arrivals(self, outputs: TurnOutputs) -> tuple[str, ...]:
        """Returns the requests that entered the waiting queue; a search enters with its
        first round, and keeps that round's place.
        """
        arrived = list[str]()
        for name in outputs.arrived:
            if (beam := self._beams.get(name)) is None:
                arrived.append(name)
                continue
            search = beam.search
            if (place := outputs.places.get(name)) is not None:
                first_round = Continuation(place=place)
                search.request = evolve(search.request, continuation=first_round)
            if not search.rounds.next_round.number:
                arrived.append(search.request.id)
        return tuple(arrived)

    def _advance(
        self, beam_ends: Iterable[Finished]
    ) -> tuple[list[LiveSearch], EngineDied | None]:
        """Continue searches of which requests have ended; returns those that are over,
        and a death with those that a dead engine did not take.
        """
        finished_searches, lost_ids, reason = list[LiveSearch](), list[str](), ""
        for search in self._note_ends(beam_ends):
            if self._searches.get(search.request.id) is not search:
                continue  # it was over before these outputs were read: see `_note_ends`
            if search.failed is None and search.cancelled:
                search.fail(Finished(search.request.id, 0, "cancelled", 0))
            if search.failed is None:
                offers = [search.offers[beam] for beam in range(len(search.rounds.beams))]
                search.rounds = search.rounds.after_round(offers)
            if search.failed is not None or search.rounds.is_finished:
                self._forget(search.request.id)
                finished_searches.append(search)
                continue
            try:
                self._client.submit(self._next_round(search))
            except EngineDeadError as error:
                self._forget(search.request.id)
                lost_ids.append(search.request.id)
                reason = str(error)
            except RequestError as error:
                self._forget(search.request.id)
                search.fail(Finished(search.request.id, 0, "error", 0, str(error)))
                finished_searches.append(search)
        death = EngineDied(tuple(lost_ids), reason) if lost_ids else None
        return finished_searches, death

    def _note_ends(self, beam_ends: Iterable[Finished]) -> list[LiveSearch]:
        """Note ends of beams' requests; returns the searches whose round is over. If one
        request of a round failed, the others are cancelled; a client without a link
        reports their ends at once, while these outputs are read.
        """
        searches = dict[str, LiveSearch]()
        for end in beam_ends:
            if (beam := self._beams.get(end.id)) is None:
                continue
            self._release(end.id)
            search = beam.search
            search.names.discard(end.id)
            searches[search.request.id] = search
            if not search.rounds.next_round.number:
                search.cached = end.cached
            if end.reason not in ("stop", "length"):
                search.fail(end)
            elif beam.beam not in search.offers:
                search.fail(Finished(end.id, 0, "error", 0, _NO_LOGPROBS_ERROR))
        for search in searches.values():
            if search.failed is not None and search.names:
                self._client.cancel(sorted(search.names))
        return [search for search in searches.values() if not search.names]


def _without_rows(column: tuple[T, ...], rows: Mapping[int, object]) -> tuple[T, ...]:
    """Returns a column without the entries at some places."""
    if not rows or not column:
        return column
    return tuple([entry for row, entry in enumerate(column) if row not in rows])


def _with_outputs(outputs: TurnOutputs, search: LiveSearch) -> TurnOutputs:
    """Returns outputs with a search's end: if it ended well, with the best sequences."""
    name, count, failed = search.request.id, search.request.n, search.failed
    if failed is not None:
        ends = tuple(
            Finished(name, i, failed.reason, 0, failed.error) for i in range(count)
        )
        return evolve(outputs, finished=(*outputs.finished, *ends))
    hypotheses = search.rounds.best(count)
    ids = tuple((name, i) for i in range(count))
    ends = tuple(
        BeamFinished(
            name,
            i,
            hypothesis.reason,
            len(hypothesis.tokens),
            cached=search.cached,
            cum_logprob=hypothesis.logprob,
        )
        for i, hypothesis in enumerate(hypotheses)
    )
    padded = (*outputs.logprobs, *((),) * count) if outputs.logprobs else ()
    return evolve(
        outputs,
        ids=(*outputs.ids, *ids),
        tokens=(*outputs.tokens, *[hypothesis.tokens for hypothesis in hypotheses]),
        logprobs=padded,
        finished=(*outputs.finished, *ends),
    )
