"""Which of a front's requests goes to which replica of the engine, and their moves.

    submit --> route --> sent to a replica -- it died, or `move` --> resumed on another
                 |                                                   one, with its
                 +--> waits here: the policy defers it, or           tokens as history
                      no replica takes requests

Theory. A request can go anywhere at any time, as the front has all of it. When a replica
is gone its requests go to the others at once; those that waited in its queue, and those
that ran there. One of them may be the cause. It then kills the next replica as well, and
is a suspect from then on (`quarantine`), as are all that were there both times. A suspect
never goes to an engine that serves others: it goes to one that loads, or is in the hello
to the next one that starts, whichever replica that is, so that it runs there first, and
alone. So a request that kills engines ends as it does with one replica, after as many
deaths, and two replicas at most see them while they serve others.

With one replica there is no router, and all that is not on it goes to its next engine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.effects.live.client import TurnOutputs
from minfer.effects.live.link import link_messages as wire
from minfer.effects.live.link.front_request import FrontRequest
from minfer.effects.live.link.front_requests import FrontRequests
from minfer.effects.live.link.front_router import FrontRouter, routing_request
from minfer.effects.live.link.prefill_first import PrefillFirst
from minfer.effects.live.link.replica_link import MOST_FAILURES, ReplicaLink
from minfer.effects.live.live_requests import LiveRequests
from minfer.effects.live.request_names import search_of
from minfer.effects.text.timeline import Sending
from minfer.records.messages import Finished
from minfer.records.request import Request
from minfer.routing.messages import (
    Dispatched,
    Ended,
    NoReplica,
    Placed,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RouterEvent,
    Started,
)

# Why a request was sent to a replica without a decision of the router.
MOVED: Final = "moved"
SEARCH: Final = "search"  # a later round of a beam search
HANDED_OVER: Final = "handed over"  # by the one that has computed its prompt
# Searches of which the replica is known; the next round of another one is routed anew.
_SEARCHES: Final = 4096


class Placement:
    """The requests of a front, on their replicas; without a router, on the only one."""

    def __init__(
        self,
        live: LiveRequests,
        replicas: Sequence[ReplicaLink],
        router: FrontRouter | None,
        prefill: PrefillFirst | None = None,
    ) -> None:
        self.requests = FrontRequests(live)
        self.router = router
        self.prefill = prefill  # if prompts are computed by some, and outputs by others
        self._live = live
        self._replicas = replicas
        # Where rounds of beam searches ran: their KV is there, and their queue place.
        self._searches: dict[str, int] = {}

    def submit(self, requests: Iterable[Request]) -> None:
        """Send new requests to replicas, those of one replica together, or have them
        wait.
        """
        self._place([self.requests.add(request) for request in requests])

    def place_waiting(self) -> None:
        """Send the requests that wait here to replicas that take them now."""
        waiting = self.requests.unplaced
        if self.router is not None and waiting:
            self._place(list(waiting.values()))

    def resumed_by(self, replica: ReplicaLink) -> tuple[wire.Resumed, ...]:
        """Returns the requests that wait for the next engine, which is this one."""
        every = list(self.requests.unplaced.values())
        if replica.elsewhere:  # its engine may serve others
            return ()
        if self.router is not None:
            every = [kept for kept in every if kept.suspect]
        each = (self.requests.resume(kept, replica.number) for kept in every)
        return tuple(part for parts in each for part in parts)

    def move(self, name: str, number: int, end: Callable[[], None]) -> bool:
        """Move a request to another replica, with its tokens so far as history: it goes
        on there, and what the other one still sends does not count. `end` is called while
        it is on none, to end what has to. Returns False if it is not served here, or is
        there already, or if that replica takes no requests.
        """
        kept, target = self.requests.get(name), self._replicas[number]
        if kept is None or kept.replica == number or not _takes(target):
            return False
        if kept.replica is not None:
            send = self._replicas[kept.replica].send
            names = self.requests.leave(kept)
            if send is not None:
                send(wire.CancelRequests(names))
        end()
        if kept.left() and kept.replica is None:
            self._note_dispatch(kept, target, MOVED)
            self._send(target, [kept])
        return True

    def hand_over(self, outputs: TurnOutputs) -> TurnOutputs:
        """Send requests whose prompts are computed to the replicas that decode them;
        returns the outputs without the ends of these prefills.
        """
        if self.prefill is None or not outputs.finished:
            return outputs
        left = list[Finished]()
        for done in outputs.finished:
            kept = self.requests.get(done.id)
            if kept is None or not self.prefill.is_first_half(kept, done):
                left.append(done)
                continue
            self._go_on(kept, done, self.prefill)
        return evolve(outputs, finished=tuple(left))

    def _go_on(self, kept: FrontRequest, done: Finished, prefill: PrefillFirst) -> None:
        """Have a request decoded by its target, or, if that is gone, placed again."""
        target = None if kept.target is None else self._replicas[kept.target]
        if kept.cached is None:
            kept.cached = done.cached
        self.requests.leave(kept)
        prefill.router.apply(Ended(done.id))
        if kept.ends_without_engine():
            return  # it has to end, which the caller reports
        if target is None or not _takes(target):
            self.place_waiting()
            return
        kept.prefilled = done.reason == "length"  # else it was refused there
        prefill.handed_over += kept.prefilled
        self._note_sending(kept, target, HANDED_OVER, kept.held)
        self._send(target, [kept])

    # --- what the router must know ------------------------------------------------------

    def router_of(self, replica: ReplicaLink) -> FrontRouter | None:
        """The router among replicas that do what this one does, if there is one."""
        if self.prefill is not None and replica.prefills:
            return self.prefill.router
        return self.router

    def note_ready(self, replica: ReplicaLink) -> None:
        """Note that a replica takes requests, or that it serves one alone now."""
        if (router := self.router_of(replica)) is None:
            return
        if _takes(replica):
            router.apply(ReplicaJoined(replica.name))
            self.place_waiting()
        else:
            router.apply(ReplicaDraining(replica.name))

    def note_gone(self, replica: ReplicaLink) -> None:
        """Note that a replica has left: what was on it waits here."""
        router = self.router_of(replica)
        if router is not None and replica.name in router.state.replicas:
            router.apply(ReplicaLeft(replica.name))
        on = self._searches.items()
        self._searches = {name: at for name, at in on if at != replica.number}

    def note_progress(self, ended: Sequence[str]) -> None:
        """Note which requests have ended, and those whose first tokens came: others may
        have waited for that.
        """
        started, self.requests.started = self.requests.started, []
        if self.router is None or not (started or ended):
            return
        prefill = None if self.prefill is None else self.prefill.router
        for router in filter(None, (prefill, self.router)):
            events: list[RouterEvent] = []
            events += [Started(name) for name in started if router.has(name)]
            events += [Ended(name) for name in ended if router.has(name)]
            if events:
                router.apply(*events)
                self.place_waiting()

    # --- decisions ----------------------------------------------------------------------

    def _place(self, each: Iterable[FrontRequest]) -> None:
        """Send requests to where they go, in order."""
        if self.router is None:
            (replica,) = self._replicas
            if replica.send is not None:
                self._send(replica, each)
            return
        chosen = defaultdict[int, list[FrontRequest]](list)
        full = set[str]()  # tenants of which no more is taken now
        for kept in each:
            client = kept.request.client
            if client in full:
                continue
            if kept.suspect and self._next_engine_comes():
                if (loading := self._loading()) is not None:
                    chosen[loading].append(kept)
                continue
            number = self._choose(kept, self.router)
            if number is None:
                full.add(client)
            else:
                chosen[number].append(kept)
        for number, some in chosen.items():
            self._send(self._replicas[number], some)

    def _choose(self, kept: FrontRequest, router: FrontRouter) -> int | None:
        """Returns the replica of a request, or None if it has to wait."""
        request = kept.request
        search = "" if request.search is None else search_of(request.id)
        at = self._searches.get(search)
        if at is not None and _takes(self._replicas[at]):
            self._note_dispatch(kept, self._replicas[at], SEARCH)
            return at
        record = self._live[request.id]
        decision = router.route(request, record.session, again=kept.sent)
        if isinstance(decision, NoReplica) and self.prefill is not None:
            # One that prefills can decode, too.
            decision = self.prefill.router.route(request, record.session, again=kept.sent)
        elif isinstance(decision, Placed) and self.prefill is not None:
            first = self.prefill.place(kept, decision, record.session)
            if first is not None:
                target = self._replicas[int(decision.replica)]
                kept.push_to = self._replicas[int(first.replica)].pushes_to(target)
                decision = first
        if not isinstance(decision, Placed):
            return None
        number = int(decision.replica)
        sending = Sending(decision, self._replicas[number].machine)
        record.sendings.append(sending)
        if search:
            if (whole := self._live.get(search)) is not None:
                whole.sendings.append(sending)
            if request.place is not None:  # it is not valid in another engine
                kept.request = evolve(request, place=None)
            if len(self._searches) >= _SEARCHES:
                del self._searches[next(iter(self._searches))]
            self._searches[search] = number
        return number

    def _note_dispatch(self, kept: FrontRequest, replica: ReplicaLink, why: str) -> None:
        """Note that a request goes to a replica without a decision of the router."""
        if (router := self.router_of(replica)) is None:
            return
        record = self._live[kept.request.id]
        asked = routing_request(kept.request, record.session)
        router.apply(Dispatched(replica.name, asked))
        router.count(replica.name, why)
        self._note_sending(kept, replica, why)

    def _note_sending(
        self, kept: FrontRequest, replica: ReplicaLink, why: str, hit: int = 0
    ) -> None:
        """Note, for people, that a request goes to a replica."""
        record = self._live[kept.request.id]
        asked = routing_request(kept.request, record.session)
        blocks, tokens = len(asked.keys), asked.tokens
        placed = Placed(asked.id, replica.name, why, hit, blocks, tokens)
        record.sendings.append(Sending(placed, replica.machine))

    def _send(self, replica: ReplicaLink, each: Iterable[FrontRequest]) -> None:
        """Send requests to a replica, which has a link."""
        new, again = list[Request](), list[wire.Resumed]()
        for kept in each:
            if kept.sent:
                again += self.requests.resume(kept, replica.number)
            else:
                new.append(self.requests.send(kept, replica.number))
        if replica.send is None:
            return
        if new:
            replica.send(wire.SubmitRequests(tuple(new)))
        if again:
            replica.send(wire.ResumeRequests(tuple(again)))

    def _loading(self) -> int | None:
        """Returns a replica whose engine is there and serves nothing yet, if there is
        one.
        """
        for one in self._replicas:
            if one.send and one.progress is not None and not one.elsewhere:
                return one.number
        return None

    def _next_engine_comes(self) -> bool:
        """Returns whether a replica of this machine is about to have a new engine."""
        return any(
            one.progress is not None and one.failures < MOST_FAILURES
            for one in self._replicas
            if not one.elsewhere
        )


def _takes(replica: ReplicaLink) -> bool:
    """Returns whether a replica takes requests: it is ready, and serves no suspect."""
    return replica.send is not None and replica.progress is None and not replica.probing
