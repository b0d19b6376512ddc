"""Which of a front's requests goes to which replica of the engine, and their moves.

    submit --> route --> sent to a replica -- it died, or `move` --> resumed on another
                 |                                                   one, with its
                 +--> waits here: the policy defers it, or           tokens as history
                      no replica takes requests

Theory. A request can go anywhere at any time, as the front has all of it. When a replica
is gone, the requests that waited in its queue go to the others at once. Those that it was
serving do so if two others take requests; else they wait until two replicas do (or no
other one will: `ReplicaLink.will_take`). For one of them may be the cause, and kill the
next replica as well; then there is still one that serves. All that were there both times
are suspects (`quarantine`). A suspect runs alone, on the first replica of this machine,
at a time when another one takes requests: what runs there leaves it, and goes to the
others. If its engine crashes then, too, the suspect is ended, and refused for a while
(`crash_denylist`).

So at most two engines die while they serve others because of one request, and it never
takes away the last replica that serves. That holds for a request that kills an engine by
its prompt, at a position of its output, or after about as many tokens of each engine, but
not for one that kills at random.

With one replica there is no router: all that is not on it goes to its next engine, and
while a suspect runs alone there, all others wait here.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.effects.cluster.engine_client.front_request import FrontRequest
from minfer.effects.cluster.engine_client.front_requests import FrontRequests
from minfer.effects.cluster.engine_client.front_router import FrontRouter, routing_request
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashDenylist
from minfer.effects.live.client import TurnOutputs
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.denylist = CrashDenylist(clock)
        self._clock = clock
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
        if waiting := self.requests.unplaced:
            self._place(list(waiting.values()))

    def note_time(self) -> None:
        """Send the requests that waited for an engine which has not started in time."""
        unplaced = self.requests.unplaced.values()
        if any(kept.deaths or self._runs_alone(kept) for kept in unplaced):
            self.place_waiting()

    def resumed_by(self, replica: ReplicaLink) -> tuple[wire.Resumed, ...]:
        """Returns the requests that wait for the next engine, which is this one."""
        every = list(self.requests.unplaced.values())
        if replica.elsewhere:  # its engine may serve others
            return ()
        if self.router is not None:
            if self._isolation() is not replica:
                return ()
            every = [kept for kept in every if self._runs_alone(kept)]
        return tuple(resumed for kept in every for resumed in self._resume(kept, replica))

    def move(self, name: str, number: int, end: Callable[[], None]) -> bool:
        """Move a request to another replica, with its tokens so far as history: it goes
        on there, and what the other one still sends does not count. `end` is called while
        it is on none, to end what has to. Returns False if it is not served here, or is
        there already, or if that replica takes no requests.
        """
        kept, target = self.requests.get(name), self._replicas[number]
        if kept is None or kept.replica == number or not target.takes_requests:
            return False
        if self._runs_alone(kept) or (kept.deaths and not self._may_lose_one()):
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

    def move_others(self, replica: ReplicaLink) -> None:
        """Take all requests from a replica but the one that it serves alone, and those
        that it holds until they run alone.
        """
        names = list[str]()
        for kept in self.requests.on(replica.number):
            if replica.probing in kept.names:
                kept.waits_alone = False
            elif not kept.waits_alone:
                names += self.requests.leave(kept)
                for router in self._routers():
                    if router.has(kept.request.id):
                        router.apply(Ended(kept.request.id))
        if names and replica.send is not None:
            replica.send(wire.CancelRequests(tuple(names)))

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
        if target is None or not target.takes_requests:
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
        if replica.takes_requests:
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
        for router in self._routers():
            events: list[RouterEvent] = []
            events += [Started(name) for name in started if router.has(name)]
            events += [Ended(name) for name in ended if router.has(name)]
            if events:
                router.apply(*events)
                self.place_waiting()

    def _routers(self) -> list[FrontRouter]:
        prefill = None if self.prefill is None else self.prefill.router
        return [router for router in (prefill, self.router) if router is not None]

    # --- decisions ----------------------------------------------------------------------

    def _place(self, each: Iterable[FrontRequest]) -> None:
        """Send requests to where they go, in order."""
        if self.router is None:
            (replica,) = self._replicas
            if replica.send is not None:
                alone = bool(replica.probing)
                due = [kept for kept in each if not alone or self._runs_alone(kept)]
                self._send(replica, due)
            return
        chosen = defaultdict[int, list[FrontRequest]](list)
        full = set[str]()  # tenants of which no more is taken now
        for kept in each:
            client = kept.request.client
            if self._runs_alone(kept):
                isolation = self._isolation()
                if isolation is not None and isolation.send is not None:
                    chosen[isolation.number].append(kept)
                continue
            if client in full or (kept.deaths and not self._may_lose_one()):
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
        if at is not None and self._replicas[at].takes_requests:
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
            if kept.sent or self._runs_alone(kept):
                again += self._resume(kept, replica)
            else:
                new.append(self.requests.send(kept, replica.number))
        if replica.send is None:
            return
        if new:
            replica.send(wire.SubmitRequests(tuple(new)))
        if again:
            replica.send(wire.ResumeRequests(tuple(again)))

    def _resume(self, kept: FrontRequest, replica: ReplicaLink) -> list[wire.Resumed]:
        isolated = self.denylist.isolates(kept.request.client)
        return self.requests.resume(kept, replica.number, isolated=isolated)

    def _runs_alone(self, kept: FrontRequest) -> bool:
        """Returns whether a request must run alone."""
        return kept.suspect or self.denylist.isolates(kept.request.client)

    def _isolation(self) -> ReplicaLink | None:
        """Returns the replica on which requests run alone: of this machine, the first
        that has an engine or is about to have one, so that all fronts choose the same.
        None: suspects wait until a second replica takes requests, for the others.
        """
        now = self._clock()
        local = [link for link in self._replicas if not link.elsewhere]
        able = [link for link in local if link.takes_requests or link.will_take(now)]
        others = [link for link in able[1:] if link.takes_requests]
        return able[0] if able and (others or len(able) == 1) else None

    def _may_lose_one(self) -> bool:
        """Returns whether a replica may be lost: another one serves, or waiting for a
        second one is useless, as none will start.
        """
        now = self._clock()
        if sum(link.takes_requests for link in self._replicas) > 1:
            return True
        return not any(link.will_take(now) for link in self._replicas)
