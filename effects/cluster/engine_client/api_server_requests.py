"""What an API server keeps of its requests, so that they outlive an engine.

Of each request: its prompt and parameters, every token that came, and all commands to the
engine since. From these follow how it is resubmitted, to the next engine or to another
one (`request_sender`), and how to read outputs of an engine in which it, or a part of it,
has another name.

    add --> unplaced -- `request_sender` --> on a replica --> ended
               ^                                  |
               +------ lose (it died), leave -----+

A request is on one replica at most, and only what comes from that one, under the names
that it has there, is taken for its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import evolve, frozen

from minfer.effects.cluster.engine_client.api_server_request import ApiServerRequest
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import EndKind
from minfer.effects.live.client import RequestReason, TurnOutputs
from minfer.effects.live.request_names import request_of
from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request
from minfer.records.sequence import SampleId


@frozen
class _BatchRows:
    """The last outputs of an engine that had a batch: its samples, and for each the
    request and its sample, if that is on this engine.
    """

    ids: tuple[SampleId, ...] = ()
    rows: tuple[tuple[ApiServerRequest, int] | None, ...] = ()


_NO_BATCH: Final = _BatchRows()


class ApiServerRequests:
    """The requests of an API server that have not ended."""

    def __init__(self, live: RequestRegistry) -> None:
        self._live = live
        self._requests: dict[str, ApiServerRequest] = {}  # by id, in the order of arrival
        self._batches: dict[int, _BatchRows] = {}  # by replica
        # Those that are on no replica, by id, in the order in which they came to be so.
        self.unplaced: dict[str, ApiServerRequest] = {}
        # Where rounds of beam searches ran: their KV is there, and their queue place.
        self.searches: dict[str, int] = {}
        self.started: list[str] = []  # ids of requests whose first tokens came

    def all(self) -> list[ApiServerRequest]:
        """Returns all of them."""
        return list(self._requests.values())

    def on(self, replica: int) -> list[ApiServerRequest]:
        """Returns those that are on a replica."""
        return [
            request_state
            for request_state in self.all()
            if request_state.replica == replica
        ]

    def get(self, name: str) -> ApiServerRequest | None:
        """Returns the request with an id, if there is one."""
        return self._requests.get(name)

    def add(self, request: Request) -> ApiServerRequest:
        """Add a request, under an id that no other one has; it is on no replica yet."""
        record = self._live.add(request)
        record.stage = RequestStage.SUBMITTED
        request_state = self._requests[request.id] = ApiServerRequest.of(record)
        self.unplaced[request.id] = request_state
        return request_state

    def cancel(self, ids: Iterable[str]) -> Mapping[int, list[str]]:
        """Note that requests have to end; returns their names on the links, by
        replica.
        """
        names = defaultdict[int, list[str]](list)
        for name in ids:
            if (request_state := self.get(name)) is not None:
                request_state.cancelled = True
                if request_state.replica is not None:
                    names[request_state.replica] += request_state.names
        return names

    def finish(self, ends: Iterable[Finish]) -> Mapping[int, list[Finish]]:
        """Note that samples have to end at a length; returns that with their names on the
        links, by replica.
        """
        named_ends = defaultdict[int, list[Finish]](list)
        for end in ends:
            request_state = self.get(end.id)
            if request_state is not None and end.sample not in request_state.ended:
                request_state.ends[end.sample] = end
                if request_state.replica is not None:
                    named_ends[request_state.replica] += self._as_named(
                        request_state, end
                    )
        return named_ends

    # --- away from a replica ------------------------------------------------------------

    def leave(self, request_state: ApiServerRequest) -> tuple[str, ...]:
        """Take a request from its replica, which lives; returns its names there. What
        still comes from there is not its own any more.
        """
        names = tuple(request_state.names)
        request_state.clear()
        if request_state.replica is not None:
            batch = self._batches.get(request_state.replica, _NO_BATCH)
            rows = [
                row and (None if row[0] is request_state else row) for row in batch.rows
            ]
            pairs = zip(batch.ids, rows, strict=True)
            ids = [sample_id if row else ("", sample_id[1]) for sample_id, row in pairs]
            self._batches[request_state.replica] = _BatchRows(tuple(ids), tuple(rows))
        request_state.leave_engine()
        self.unplaced[request_state.request.id] = request_state
        return names

    def lose(self, replica: int, probing: str = "", *, served: bool = True) -> None:
        """Note that the link to a replica is over, on which `probing` ran alone, if it is
        set. If the engine had not `served` yet, no request is a suspect.
        """
        for request_state in self.on(replica):
            if not served:
                request_state.leave_engine()
            else:
                request_state.note_death(
                    request_state.samples_named(probing), probing=bool(probing)
                )
            self.unplaced[request_state.request.id] = request_state
        self._batches.pop(replica, None)
        searches = self.searches.items()
        self.searches = {name: number for name, number in searches if number != replica}

    def causes(self, replica: int, kind: EndKind) -> list[ApiServerRequest]:
        """Returns the requests that were the cause of an engine's end, which served them
        alone; called when the next engine of that replica connects.
        """
        return [
            request_state
            for request_state in self.all()
            if request_state.solo.is_cause(replica, kind)
        ]

    def pending_ends(self) -> tuple[Finished, ...]:
        """Returns the ends of requests and samples that have to end, and that no engine
        has.
        """
        unplaced = list(self.unplaced.values())
        return tuple(
            end
            for request_state in unplaced
            for end in request_state.ends_without_engine()
        )

    # --- outputs ------------------------------------------------------------------------

    def take(self, outputs: wire.ApiServerOutputs, replica: int = 0) -> TurnOutputs:
        """Keep an engine's outputs, and return them with the requests' own ids."""
        if outputs.ids:
            self._batches[replica] = self._batch(outputs.ids, replica)
        batch = self._batches.get(replica, _NO_BATCH)
        has_batch = outputs.ids is None or len(outputs.ids) > 0
        if has_batch:
            for row, tokens in zip(batch.rows, outputs.tokens, strict=True):
                if tokens and row is not None:
                    request_state, sample = row
                    if not request_state.started:
                        request_state.started = True
                        self.started.append(request_state.request.id)
                    request_state.tokens[sample] += tokens
                    request_state.histories[sample].tokens_received += len(tokens)
        reasons = [self._reason(reason, replica) for reason in outputs.reasons]
        places = {
            placed.request.id: place
            for name, place in outputs.places.items()
            if (placed := self._named_by(name, replica)) is not None
        }
        owners = [self._named_by(name, replica) for name in outputs.arrived]
        arrived = [request_state for request_state in owners if request_state]
        for request_state in arrived:
            request_state.compiling = False
        finished = [self._finished(end, replica) for end in outputs.finished]
        return TurnOutputs(
            time=outputs.time,
            ids=batch.ids if has_batch else (),
            tokens=outputs.tokens,
            logprobs=outputs.logprobs,
            pooled=outputs.pooled,
            drafts=outputs.drafts,
            finished=tuple([end for end in finished if end is not None]),
            arrived=tuple([request_state.request.id for request_state in arrived]),
            places=places,
            reasons=tuple([reason for reason in reasons if reason is not None]),
            waits=outputs.waits,
        )

    def end(self, finished: Sequence[Finished]) -> list[str]:
        """Note that samples have ended, by the requests' own ids; returns the requests
        that have ended with them.
        """
        ended = []
        for end in finished:
            if (request_state := self.get(end.id)) is not None:
                request_state.ended.add(end.sample)
                if not request_state.left():
                    self._live.end(end.id)
                    del self._requests[end.id]
                    self.unplaced.pop(end.id, None)
                    ended.append(end.id)
        return ended

    def close(self) -> None:
        """End all, without outputs."""
        for name in list(self._live.served()):
            self._live.end(name)
        self._requests.clear()
        self.unplaced.clear()

    def _batch(self, ids: tuple[SampleId, ...], replica: int) -> _BatchRows:
        """Returns a new batch, with the requests of its rows."""
        own_ids: list[SampleId] = []
        rows: list[tuple[ApiServerRequest, int] | None] = []
        for name, number in ids:
            request_state = self._named_by(name, replica)
            if request_state is None:
                own_ids.append(("", number))
                rows.append(None)
            else:
                sample = _own_sample(request_state, name, number)
                own_ids.append((request_state.request.id, sample))
                rows.append((request_state, sample))
        return _BatchRows(tuple(own_ids), tuple(rows))

    def _named_by(self, name: str, replica: int) -> ApiServerRequest | None:
        """Returns the request that a name on a link is of: its own id, or a new one if it
        was resubmitted.
        """
        for request_id in (name, request_of(name)):
            request_state = self.get(request_id)
            if (
                request_state is not None
                and request_state.replica == replica
                and name in request_state.names
            ):
                return request_state
        return None

    def _finished(self, end: Finished, replica: int) -> Finished | None:
        if (request_state := self._named_by(end.id, replica)) is None:
            return None
        sample = _own_sample(request_state, end.id, end.sample)
        handover = request_state.handover
        prefill_cached = None if handover is None else handover.cached
        cached = end.cached if prefill_cached is None else prefill_cached
        return evolve(end, id=request_state.request.id, sample=sample, cached=cached)

    def _reason(self, wire_reason: wire.WireReason, replica: int) -> RequestReason | None:
        name = wire_reason.reason.id
        if (request_state := self._named_by(name, replica)) is None:
            return None
        sample = _own_sample(request_state, name, wire_reason.reason.sample)
        if isinstance(wire_reason, wire.AdmittedReason):
            request_state.histories[sample].admitted = True
        return evolve(wire_reason.reason, id=request_state.request.id, sample=sample)

    def _as_named(self, request_state: ApiServerRequest, end: Finish) -> list[Finish]:
        """Returns an end with the sample's name on the link, if there is one."""
        for name, sample in request_state.names.items():
            if sample is None:
                return [evolve(end, id=name)]
            if sample == end.sample:
                return [evolve(end, id=name, sample=0)]
        return []


def _own_sample(request_state: ApiServerRequest, name: str, number: int) -> int:
    """Returns the sample of a request that has a number under a name on the link."""
    sample = request_state.names[name]
    return number if sample is None else sample
