"""The beam searches of a front: it submits their rounds, and reports each search as one
request.

    Front --SearchRequest--> BeamSearches --rounds, ordinary requests--> engine client
    Front <--its outputs---- BeamSearches <-------their outputs--------- engine client

The front gets outputs of one request: its arrival, its first admission, its end and the
sequences. A round is submitted as soon as all beams of the round before have ended, in
the thread that gets the outputs.
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
from minfer.effects.live.live_requests import Stage
from minfer.effects.text.outputs import BeamFinished
from minfer.records.messages import Admitted, Finished, Preempted
from minfer.records.request import Continuation, Request
from minfer.sampling.beam import Candidates

T = TypeVar("T")
_NO_NUMBERS = "the model gave a beam no log-probabilities that can be compared"


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

    def fail(self, done: Finished) -> None:
        """Note the end of one of its requests that failed."""
        self.failed = self.failed or done


@frozen(eq=False)
class SearchBeam:
    """Where the outputs of a request go that is part of a search's round."""

    search: LiveSearch
    beam: int


class BeamSearches:
    """The searches of one front. Methods may be called from any thread."""

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
        one = isinstance(request, SearchRequest)
        self._client.check(evolve(request, n=1) if one else request)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests, searches among them, as `EngineClient.submit`."""
        if not any(isinstance(one, SearchRequest) for one in requests):
            self._client.submit(requests)
            return
        with self._lock:
            for one in requests:
                self._requests.check_new(one)
            found = list[Request]()
            try:
                for one in requests:
                    if isinstance(one, SearchRequest):
                        found += self._begin(one)
                    else:
                        found.append(one)
                self._client.submit(found)
            except (EngineDeadError, RequestError):
                for one in requests:
                    self._forget(one.id)
                raise

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """End requests, as `EngineClient.cancel`; of searches, all their running
        requests.
        """
        with self._lock:
            # In the journal's order.
            wanted = {name: self._searches.get(name) for name in ids}
            searches = [one for one in wanted.values() if one is not None]
            names = dict.fromkeys(name for name, one in wanted.items() if one is None)
            for search in searches:
                search.cancelled = True
                names |= dict.fromkeys(sorted(search.names))
            served = self._client.cancel(names)
            found = {one.request.id for one in searches if one.names & served}
            return frozenset(served & wanted.keys() | found)

    def translate(self, message: EngineMessage) -> list[EngineMessage]:
        """Returns what a front gets for a message of the engine."""
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
        record.stage = Stage.SEARCHING
        search = LiveSearch(request, SearchRounds.of(request))
        self._searches[request.id] = search
        return self._next_round(search)

    def _next_round(self, search: LiveSearch) -> tuple[Request, ...]:
        """Register and return the requests of a search's next round."""
        search.rounds, requests = round_requests(search.rounds, search.request)
        search.offers = {}
        for at, one in enumerate(requests):
            self._requests.add(one, read=True)
            self._beams[one.id] = SearchBeam(search, at)
            search.names.add(one.id)
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
        others = [name for name, one in beams.items() if one is None]
        searches = [one.search.request.id for one in beams.values() if one is not None]
        for name in self.live:
            self._forget(name)
        return EngineDied((*others, *dict.fromkeys(searches)), death.why)

    # --- outputs ------------------------------------------------------------------------

    def _translate_outputs(self, outputs: TurnOutputs) -> list[EngineMessage]:
        """Returns outputs without those of beams, and with those of their searches."""
        places = {
            at: beam
            for at, (name, _) in enumerate(outputs.ids)
            if (beam := self._beams.get(name)) is not None
        }
        for at, one in places.items():
            logprobs = outputs.logprobs[at] if outputs.logprobs else ()
            if (offer := candidates_of(one.beam, logprobs)) is not None:
                one.search.offers[one.beam] = offer
        reasons = self._translate_reasons(outputs)
        arrived = self._translate_arrivals(outputs)
        ended = [done for done in outputs.finished if done.id in self._beams]
        finished = [done for done in outputs.finished if done.id not in self._beams]
        passed = evolve(
            outputs,
            ids=_without(outputs.ids, places),
            tokens=_without(outputs.tokens, places),
            logprobs=_without(outputs.logprobs, places),
            pooled=_without(outputs.pooled, places),
            drafts=_without(outputs.drafts, places),
            finished=tuple(finished),
            arrived=arrived,
            reasons=reasons,
        )
        if not ended:
            return [passed]
        over, dead = self._advance(ended)
        for search in over:
            passed = _with_outputs(passed, search)
        return [passed, *([dead] if dead else [])]

    def _translate_reasons(self, outputs: TurnOutputs) -> tuple[RequestReason, ...]:
        """Returns reasons, with those of beams as their search's: its first admission,
        and preemptions.
        """
        found = list[RequestReason]()
        for one in outputs.reasons:
            if (beam := self._beams.get(one.id)) is None:
                found.append(one)
            elif isinstance(one, Preempted) or (
                isinstance(one, Admitted) and not beam.search.rounds.about.number
            ):
                found.append(evolve(one, id=beam.search.request.id, sample=0))
        return tuple(found)

    def _translate_arrivals(self, outputs: TurnOutputs) -> tuple[str, ...]:
        """Returns the requests that entered the waiting queue; a search enters with its
        first round, and keeps that round's place.
        """
        found = list[str]()
        for name in outputs.arrived:
            if (beam := self._beams.get(name)) is None:
                found.append(name)
                continue
            search = beam.search
            if (place := outputs.places.get(name)) is not None:
                first_round = Continuation(place=place)
                search.request = evolve(search.request, continuation=first_round)
            if not search.rounds.about.number:
                found.append(search.request.id)
        return tuple(found)

    def _advance(
        self, ended: Iterable[Finished]
    ) -> tuple[list[LiveSearch], EngineDied | None]:
        """Continue searches of which requests have ended; returns those that are over,
        and a death with those that a dead engine did not take.
        """
        over, lost, why = list[LiveSearch](), list[str](), ""
        for search in self._note_ends(ended):
            if self._searches.get(search.request.id) is not search:
                continue  # it was over before these outputs were read: see `_note_ends`
            if search.failed is None and search.cancelled:
                search.fail(Finished(search.request.id, 0, "cancelled", 0))
            if search.failed is None:
                offers = [search.offers[at] for at in range(len(search.rounds.beams))]
                search.rounds = search.rounds.after_round(offers)
            if search.failed is not None or search.rounds.over:
                self._forget(search.request.id)
                over.append(search)
                continue
            try:
                self._client.submit(self._next_round(search))
            except EngineDeadError as error:
                self._forget(search.request.id)
                lost.append(search.request.id)
                why = str(error)
            except RequestError as error:
                self._forget(search.request.id)
                search.fail(Finished(search.request.id, 0, "error", 0, str(error)))
                over.append(search)
        return over, EngineDied(tuple(lost), why) if lost else None

    def _note_ends(self, ended: Iterable[Finished]) -> list[LiveSearch]:
        """Note ends of beams' requests; returns the searches whose round is over. If one
        request of a round failed, the others are cancelled; a client without a link
        reports their ends at once, while these outputs are read.
        """
        touched = dict[str, LiveSearch]()
        for done in ended:
            if (one := self._beams.get(done.id)) is None:
                continue
            self._release(done.id)
            search = one.search
            search.names.discard(done.id)
            touched[search.request.id] = search
            if not search.rounds.about.number:
                search.cached = done.cached
            if done.reason not in ("stop", "length"):
                search.fail(done)
            elif one.beam not in search.offers:
                search.fail(Finished(done.id, 0, "error", 0, _NO_NUMBERS))
        for search in touched.values():
            if search.failed is not None and search.names:
                self._client.cancel(sorted(search.names))
        return [one for one in touched.values() if not one.names]


def _without(column: tuple[T, ...], places: Mapping[int, object]) -> tuple[T, ...]:
    """Returns a column without the entries at some places."""
    if not places or not column:
        return column
    return tuple([one for at, one in enumerate(column) if at not in places])


def _with_outputs(outputs: TurnOutputs, search: LiveSearch) -> TurnOutputs:
    """Returns outputs with a search's end: if it ended well, with the best sequences."""
    name, count, failed = search.request.id, search.request.n, search.failed
    if failed is not None:
        ends = tuple(
            Finished(name, i, failed.reason, 0, failed.error) for i in range(count)
        )
        return evolve(outputs, finished=(*outputs.finished, *ends))
    found = search.rounds.found(count)
    ids = tuple((name, i) for i in range(count))
    ends = tuple(
        BeamFinished(
            name,
            i,
            one.reason,
            len(one.tokens),
            cached=search.cached,
            cum_logprob=one.logprob,
        )
        for i, one in enumerate(found)
    )
    padded = (*outputs.logprobs, *((),) * count) if outputs.logprobs else ()
    return evolve(
        outputs,
        ids=(*outputs.ids, *ids),
        tokens=(*outputs.tokens, *[one.tokens for one in found]),
        logprobs=padded,
        finished=(*outputs.finished, *ends),
    )
