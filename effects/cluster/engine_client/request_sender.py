"""Sends a front's requests to the replicas that they are assigned to: as they are, or, if
an engine had them before, as what is left of them, with their tokens as history.

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
from minfer.effects.cluster.engine_client.front_request import (
    FrontRequest,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.front_requests import FrontRequests
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.live_requests import LiveRequests, Sending
from minfer.effects.live.request_names import again_name, search_of
from minfer.records.request import Request
from minfer.routing.messages import Placed

# Why a request was sent to a replica without a decision of the router.
SEARCH: Final = "search"  # a later round of a beam search
HANDED_OVER: Final = "handed over"  # by the one that has computed its prompt
_WITHOUT_DECISION: Final = frozenset({SEARCH, HANDED_OVER})
RESUMED: Final = "resumed"  # for metrics, of one that was on another replica before
# Searches of which the replica is known; the next round of another one is routed anew.
_SEARCHES: Final = 4096


class RequestSender:
    """Sends the requests of a front. `sent` counts them, by the name of the replica, a
    space, and why.
    """

    def __init__(
        self, live: LiveRequests, requests: FrontRequests, replicas: Sequence[ReplicaLink]
    ) -> None:
        self.sent = Counter[str]()
        self._live = live
        self._requests = requests
        self._replicas = replicas
        self._again = count(1)

    def send(self, assigned: Iterable[Assignment[FrontRequest]]) -> None:
        """Send requests to their replicas, those of one replica together."""
        by_replica = defaultdict[int, list[FrontRequest]](list)
        for one in assigned:
            link = self._replicas[int(one.placed.replica)]
            self._note(one.item, one.placed, link)
            by_replica[link.number].append(one.item)
        for number, group in by_replica.items():
            self.send_to(self._replicas[number], group)

    def send_to(self, link: ReplicaLink, each: Iterable[FrontRequest]) -> None:
        """Send requests to a replica."""
        new, resumed = list[Request](), list[wire.Resumed]()
        for kept in each:
            if kept.sent or kept.runs_alone:
                resumed += self.resume(kept, link.number)
            else:
                self._go(kept, kept.request.id, None, link.number)
                new.append(_for_engine(kept, kept.request))
        link.submit(new, resumed)

    def resume(self, kept: FrontRequest, replica: int) -> list[wire.Resumed]:
        """Returns the unfinished parts of a request, to resubmit them to a replica: as a
        whole; or, if its samples have begun, each of them.
        """
        request = kept.request
        kept.waits_alone = kept.runs_alone
        if request.n == 1:
            output = request.output + tuple(kept.tokens[0])
            # Queue places are not valid in another engine.
            part = evolve(request, output=output, place=None)
            return [self._resumed(kept, part, None, replica)]
        if not kept.ended and not any(kept.tokens):
            return [self._resumed(kept, request, None, replica)]
        found = []
        for sample in kept.left():
            number = request.first_sample + sample
            output = tuple(kept.tokens[sample])
            part = evolve(request, n=1, first_sample=number, output=output)
            found.append(self._resumed(kept, part, sample, replica))
        return found

    def _resumed(
        self, kept: FrontRequest, part: Request, sample: int | None, replica: int
    ) -> wire.Resumed:
        name = again_name(kept.request.id, next(self._again))
        taken = kept.sent  # else an engine may still refuse it, as any new one
        self._go(kept, name, sample, replica)
        histories = kept.histories if sample is None else [kept.histories[sample]]
        return wire.Resumed(
            request=evolve(_for_engine(kept, part), id=name, taken=taken),
            deaths=max(history.deaths for history in histories),
            to_clear=max(history.to_clear for history in histories),
            isolated=kept.isolated,
        )

    def _go(
        self, kept: FrontRequest, name: str, sample: int | None, replica: int
    ) -> None:
        """Note that a request, or one of its samples, is sent to a replica under a
        name.
        """
        self._requests.unplaced.pop(kept.request.id, None)
        kept.replica, kept.sent = replica, True
        kept.names[name] = sample
        kept.compiling = kept.request.sampling.structured_outputs is not None

    def _note(self, kept: FrontRequest, placed: Placed, link: ReplicaLink) -> None:
        """Note where a request goes, and why."""
        decided = placed.why not in _WITHOUT_DECISION
        why = RESUMED if decided and kept.sent else placed.why
        self.sent[f"{placed.replica} {why}"] += 1
        sending = Sending(placed, link.machine)
        kept.record.sendings.append(sending)
        if kept.request.search is None or not decided:
            return
        search = search_of(kept.request.id)
        if (whole := self._live.get(search)) is not None:
            whole.sendings.append(sending)
        if kept.request.place is not None:  # it is not valid in another engine
            kept.request = evolve(kept.request, place=None)
        searches = self._requests.searches
        if len(searches) >= _SEARCHES:
            del searches[next(iter(searches))]
        searches[search] = link.number


def _for_engine(kept: FrontRequest, part: Request) -> Request:
    """Returns a request, or a part of it, as its engine gets it. A replica that computes
    the prompt for another one gets it for one more token only; the other one learns which
    blocks of the prompt were sent to it.
    """
    handover = kept.handover
    if handover is None or handover.stage is HandoverStage.OVER:
        return part
    if handover.stage is HandoverStage.DECODE:
        return evolve(part, stored=len(part.keys), sent_from=handover.held)
    return evolve(
        part,
        max_tokens=len(part.output) + 1,
        push_to=handover.push_to,
        sent_from=handover.held,
    )
