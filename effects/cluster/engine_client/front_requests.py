"""What a front keeps of its requests, so that they outlive an engine.

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

from minfer.effects.cluster.engine_client.front_request import FrontRequest
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
    rows: tuple[tuple[FrontRequest, int] | None, ...] = ()


_NO_BATCH: Final = _BatchRows()


class FrontRequests:
    """The requests of a front that have not ended."""

    def __init__(self, live: RequestRegistry) -> None:
        self._live = live
        self._requests: dict[str, FrontRequest] = {}  # by id, in the order of arrival
        self._batches: dict[int, _BatchRows] = {}  # by replica
        # Those that are on no replica, by id, in the order in which they came to be so.
        self.unplaced: dict[str, FrontRequest] = {}
        # Where rounds of beam searches ran: their KV is there, and their queue place.
        self.searches: dict[str, int] = {}
        self.started: list[str] = []  # ids of requests whose first tokens came

    def all(self) -> list[FrontRequest]:
        """Returns all of them."""
        return list(self._requests.values())

    def on(self, replica: int) -> list[FrontRequest]:
        """Returns those that are on a replica."""
        return [kept for kept in self.all() if kept.replica == replica]

    def get(self, name: str) -> FrontRequest | None:
        """Returns the request with an id, if there is one."""
        return self._requests.get(name)

    def add(self, request: Request) -> FrontRequest:
        """Add a request, under an id that no other one has; it is on no replica yet."""
        record = self._live.add(request)
        record.stage = RequestStage.SUBMITTED
        kept = self._requests[request.id] = FrontRequest.of(record)
        self.unplaced[request.id] = kept
        return kept

    def cancel(self, ids: Iterable[str]) -> Mapping[int, list[str]]:
        """Note that requests have to end; returns their names on the links, by
        replica.
        """
        names = defaultdict[int, list[str]](list)
        for name in ids:
            if (kept := self.get(name)) is not None:
                kept.cancelled = True
                if kept.replica is not None:
                    names[kept.replica] += kept.names
        return names

    def finish(self, ends: Iterable[Finish]) -> Mapping[int, list[Finish]]:
        """Note that samples have to end at a length; returns that with their names on the
        links, by replica.
        """
        outputs = defaultdict[int, list[Finish]](list)
        for end in ends:
            kept = self.get(end.id)
            if kept is not None and end.sample not in kept.ended:
                kept.ends[end.sample] = end
                if kept.replica is not None:
                    outputs[kept.replica] += self._as_named(kept, end)
        return outputs

    # --- away from a replica ------------------------------------------------------------

    def leave(self, kept: FrontRequest) -> tuple[str, ...]:
        """Take a request from its replica, which lives; returns its names there. What
        still comes from there is not its own any more.
        """
        names = tuple(kept.names)
        kept.clear()
        if kept.replica is not None:
            batch = self._batches.get(kept.replica, _NO_BATCH)
            rows = [row and (None if row[0] is kept else row) for row in batch.rows]
            pairs = zip(batch.ids, rows, strict=True)
            ids = [one if row else ("", one[1]) for one, row in pairs]
            self._batches[kept.replica] = _BatchRows(tuple(ids), tuple(rows))
        kept.leave_engine()
        self.unplaced[kept.request.id] = kept
        return names

    def lose(self, replica: int, probing: str = "", *, served: bool = True) -> None:
        """Note that the link to a replica is over, on which `probing` ran alone, if it is
        set. If the engine had not `served` yet, no request is a suspect.
        """
        for kept in self.on(replica):
            if not served:
                kept.leave_engine()
            else:
                kept.note_death(kept.samples_named(probing), probing=bool(probing))
            self.unplaced[kept.request.id] = kept
        self._batches.pop(replica, None)
        on = self.searches.items()
        self.searches = {name: at for name, at in on if at != replica}

    def causes(self, replica: int, kind: EndKind) -> list[FrontRequest]:
        """Returns the requests that were the cause of an engine's end, which served them
        alone; called when the next engine of that replica connects.
        """
        return [kept for kept in self.all() if kept.solo.is_cause(replica, kind)]

    def pending_ends(self) -> tuple[Finished, ...]:
        """Returns the ends of requests and samples that have to end, and that no engine
        has.
        """
        each = list(self.unplaced.values())
        return tuple(done for kept in each for done in kept.ends_without_engine())

    # --- outputs ------------------------------------------------------------------------

    def take(self, outputs: wire.FrontOutputs, replica: int = 0) -> TurnOutputs:
        """Keep an engine's outputs, and return them with the requests' own ids."""
        if outputs.ids:
            self._batches[replica] = self._batch(outputs.ids, replica)
        batch = self._batches.get(replica, _NO_BATCH)
        has_batch = outputs.ids is None or len(outputs.ids) > 0
        if has_batch:
            for row, tokens in zip(batch.rows, outputs.tokens, strict=True):
                if tokens and row is not None:
                    kept, sample = row
                    if not kept.started:
                        kept.started = True
                        self.started.append(kept.request.id)
                    kept.tokens[sample] += tokens
                    kept.histories[sample].tokens_received += len(tokens)
        reasons = [self._reason(part, replica) for part in outputs.reasons]
        places = {
            one.request.id: at
            for part, at in outputs.places.items()
            if (one := self._named_by(part, replica)) is not None
        }
        named = [self._named_by(name, replica) for name in outputs.arrived]
        arrived = [one for one in named if one]
        for one in arrived:
            one.compiling = False
        finished = [self._finished(done, replica) for done in outputs.finished]
        return TurnOutputs(
            time=outputs.time,
            ids=batch.ids if has_batch else (),
            tokens=outputs.tokens,
            logprobs=outputs.logprobs,
            pooled=outputs.pooled,
            drafts=outputs.drafts,
            finished=tuple([done for done in finished if done is not None]),
            arrived=tuple([one.request.id for one in arrived]),
            places=places,
            reasons=tuple([reason for reason in reasons if reason is not None]),
            waits=outputs.waits,
        )

    def end(self, finished: Sequence[Finished]) -> list[str]:
        """Note that samples have ended, by the requests' own ids; returns the requests
        that have ended with them.
        """
        ended = []
        for done in finished:
            if (kept := self.get(done.id)) is not None:
                kept.ended.add(done.sample)
                if not kept.left():
                    self._live.end(done.id)
                    del self._requests[done.id]
                    self.unplaced.pop(done.id, None)
                    ended.append(done.id)
        return ended

    def close(self) -> None:
        """End all, without outputs."""
        for name in list(self._live.served()):
            self._live.end(name)
        self._requests.clear()
        self.unplaced.clear()

    def _batch(self, ids: tuple[SampleId, ...], replica: int) -> _BatchRows:
        """Returns a new batch, with the requests of its rows."""
        batch: list[SampleId] = []
        rows: list[tuple[FrontRequest, int] | None] = []
        for name, number in ids:
            kept = self._named_by(name, replica)
            if kept is None:
                batch.append(("", number))
                rows.append(None)
            else:
                sample = _own_sample(kept, name, number)
                batch.append((kept.request.id, sample))
                rows.append((kept, sample))
        return _BatchRows(tuple(batch), tuple(rows))

    def _named_by(self, name: str, replica: int) -> FrontRequest | None:
        """Returns the request that a name on a link is of: its own id, or a new one if it
        was resubmitted.
        """
        for own in (name, request_of(name)):
            kept = self.get(own)
            if kept is not None and kept.replica == replica and name in kept.names:
                return kept
        return None

    def _finished(self, done: Finished, replica: int) -> Finished | None:
        if (kept := self._named_by(done.id, replica)) is None:
            return None
        sample = _own_sample(kept, done.id, done.sample)
        handover = kept.handover
        first = None if handover is None else handover.cached
        cached = done.cached if first is None else first
        return evolve(done, id=kept.request.id, sample=sample, cached=cached)

    def _reason(self, part: wire.WireReason, replica: int) -> RequestReason | None:
        name = part.reason.id
        if (kept := self._named_by(name, replica)) is None:
            return None
        sample = _own_sample(kept, name, part.reason.sample)
        if isinstance(part, wire.AdmittedReason):
            kept.histories[sample].admitted = True
        return evolve(part.reason, id=kept.request.id, sample=sample)

    def _as_named(self, kept: FrontRequest, end: Finish) -> list[Finish]:
        """Returns an end with the sample's name on the link, if there is one."""
        for name, sample in kept.names.items():
            if sample is None:
                return [evolve(end, id=name)]
            if sample == end.sample:
                return [evolve(end, id=name, sample=0)]
        return []


def _own_sample(kept: FrontRequest, name: str, number: int) -> int:
    """Returns the sample of a request that has a number under a name on the link."""
    sample = kept.names[name]
    return number if sample is None else sample
