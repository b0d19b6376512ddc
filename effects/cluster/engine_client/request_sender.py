"""Sends an API server's requests to the replicas that they are assigned to: as they are,
or, if an engine had them before, as what is left of them, with their tokens as history.

    assigned --> noted on the request --> by replica: new, resumed --> its link

An engine gets a resumed request under a new name: late outputs of the one before, under
the old name, are not taken for its own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from attrs import evolve

from minfer.effects.cluster.dispatch.dispatcher import Assignment
from minfer.effects.cluster.engine_client.api_server_request import (
    ApiServerRequest,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.api_server_requests import ApiServerRequests
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.request_names import resumed_name, search_of
from minfer.effects.live.request_registry import RequestRegistry, Sending
from minfer.records.request import KvTransfer, Request
from minfer.routing.messages import Placed

# Why a request was sent to a replica without a decision of the router.
SEARCH: Final = "search"  # a later round of a beam search
HANDED_OVER: Final = "handed over"  # by the replica that has computed its prompt
_WITHOUT_DECISION: Final = frozenset({SEARCH, HANDED_OVER})
RESUMED: Final = "resumed"  # for metrics, of one that was on another replica before
# Searches of which the replica is known; the next round of another one is routed anew.
_MAX_SEARCHES: Final = 4096


class RequestSender:
    """Sends the requests of an API server. `sent` counts them, by the name of the
    replica, a space, and why.
    """

    def __init__(
        self,
        live: RequestRegistry,
        requests: ApiServerRequests,
        replicas: Sequence[ReplicaLink],
    ) -> None:
        self.sent = Counter[str]()
        self._live = live
        self._requests = requests
        self._replicas = replicas
        self._resumptions = count(1)

    def send(self, assigned: Iterable[Assignment[ApiServerRequest]]) -> None:
        """Send requests to their replicas, those of one replica together."""
        by_replica = defaultdict[int, list[ApiServerRequest]](list)
        for assignment in assigned:
            link = self._replicas[int(assignment.placed.replica)]
            self._note_placement(assignment.item, assignment.placed, link)
            by_replica[link.number].append(assignment.item)
        for number, group in by_replica.items():
            self.send_to(self._replicas[number], group)

    def send_to(
        self, link: ReplicaLink, request_states: Iterable[ApiServerRequest]
    ) -> None:
        """Send requests to a replica."""
        new, resumed = list[Request](), list[wire.Resumed]()
        for request_state in request_states:
            if request_state.sent or request_state.runs_alone:
                resumed += self.resume(request_state, link.number)
            else:
                self._note_sent(
                    request_state, request_state.request.id, None, link.number
                )
                new.append(_for_engine(request_state, request_state.request))
        link.submit(new, resumed)

    def resume(self, request_state: ApiServerRequest, replica: int) -> list[wire.Resumed]:
        """Returns the unfinished parts of a request, to resubmit them to a replica: as a
        whole; or, if its samples have begun, each of them.
        """
        request = request_state.request
        request_state.waits_alone = request_state.runs_alone
        if request.n == 1:
            output = request.output + tuple(request_state.tokens[0])
            unfinished = evolve(_without_place(request), output=output)
            return [self._make_resumed(request_state, unfinished, None, replica)]
        if not request_state.ended and not any(request_state.tokens):
            return [self._make_resumed(request_state, request, None, replica)]
        resumed = []
        for sample in request_state.left():
            number = request.first_sample + sample
            output = tuple(request_state.tokens[sample])
            unfinished = evolve(request, n=1, first_sample=number, output=output)
            resumed.append(self._make_resumed(request_state, unfinished, sample, replica))
        return resumed

    def _make_resumed(
        self,
        request_state: ApiServerRequest,
        unfinished: Request,
        sample: int | None,
        replica: int,
    ) -> wire.Resumed:
        name = resumed_name(request_state.request.id, next(self._resumptions))
        was_sent = request_state.sent  # else an engine may refuse it, as any new one
        self._note_sent(request_state, name, sample, replica)
        histories = (
            request_state.histories
            if sample is None
            else [request_state.histories[sample]]
        )
        return wire.Resumed(
            request=evolve(
                _for_engine(request_state, unfinished), id=name, taken=was_sent
            ),
            deaths=max(history.deaths for history in histories),
            to_clear=max(history.to_clear for history in histories),
            isolated=request_state.isolated,
        )

    def _note_sent(
        self, request_state: ApiServerRequest, name: str, sample: int | None, replica: int
    ) -> None:
        """Note that a request, or one of its samples, is sent to a replica under a
        name.
        """
        self._requests.unplaced.pop(request_state.request.id, None)
        request_state.replica, request_state.sent = replica, True
        request_state.names[name] = sample
        request_state.compiling = (
            request_state.request.sampling.structured_outputs is not None
        )

    def _note_placement(
        self, request_state: ApiServerRequest, placed: Placed, link: ReplicaLink
    ) -> None:
        """Note where a request goes, and why."""
        was_routed = placed.why not in _WITHOUT_DECISION
        reason = RESUMED if was_routed and request_state.sent else placed.why
        self.sent[f"{placed.replica} {reason}"] += 1
        sending = Sending(placed, link.machine)
        request_state.record.sendings.append(sending)
        if request_state.request.continuation.beam_round is None or not was_routed:
            return
        search = search_of(request_state.request.id)
        if (search_record := self._live.get(search)) is not None:
            search_record.sendings.append(sending)
        request_state.request = _without_place(request_state.request)
        searches = self._requests.searches
        if len(searches) >= _MAX_SEARCHES:
            del searches[next(iter(searches))]
        searches[search] = link.number


def _without_place(request: Request) -> Request:
    """Returns a request without its queue place, which is not valid in another engine."""
    if not request.continues:
        return request
    return evolve(request, continuation=evolve(request.continuation, place=None))


def _for_engine(request_state: ApiServerRequest, request: Request) -> Request:
    """Returns a request, or a part of it, as its engine gets it. A replica that computes
    the prompt for another one gets it for one more token only; the other one learns which
    blocks of the prompt were sent to it.
    """
    handover = request_state.handover
    if handover is None or handover.stage is HandoverStage.OVER:
        return request
    if handover.stage is HandoverStage.DECODE:
        stored = KvTransfer(
            num_stored_blocks=len(request.keys), first_block=handover.target_blocks
        )
        return evolve(request, kv_transfer=stored)
    pushed = KvTransfer(push_to=handover.push_to, first_block=handover.target_blocks)
    return evolve(request, max_tokens=len(request.output) + 1, kv_transfer=pushed)
