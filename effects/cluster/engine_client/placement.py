"""Which of a front's requests goes to which replica of the engine, and their moves.

    submit --> dispatcher --> `prefill_first` --> `request_sender` --> a replica's link
       ^           |            (if prompts are computed by some
       |           |             replicas, and outputs by others)
       |           +--> waits there: the policy defers it, or no replica takes requests
       +--> held here, as below
       +--- on no replica again: its replica died, or serves another one alone; resumed
            on another one, with its tokens as history

Theory. A request can go anywhere at any time, as the front has all of it. When a replica
is gone, the requests that waited in its queue go to the others at once. Those that it was
serving do so if two others take requests; else they are held until two replicas do (or no
other one will: `ReplicaLink.will_take`). For one of them may be the cause, and kill the
next replica as well; then there is still one that serves. All that were there both times
are suspects (`quarantine`). A suspect runs alone, on the first replica of this server, at
a time when another one takes requests: what runs there leaves it, and goes to the others.
If its engine crashes then, too, the suspect is ended, and refused for a while
(`crash_denylist`).

So at most two engines die while they serve others because of one request, and it takes
away the last replica that serves only if no other one will start soon
(`ReplicaLink.will_take`): then requests do not wait for a second one. That holds for a
request that kills an engine by its prompt, at a position of its output, or after about as
many tokens of each engine, but not for one that kills at random.

With one replica there is no dispatcher: all that is not on it goes to its next engine,
and while a suspect runs alone there, all others are held here.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attrs import evolve

from minfer.effects.cluster.dispatch.dispatcher import Assignment, Dispatcher
from minfer.effects.cluster.dispatch.tenant_queue import Waiting
from minfer.effects.cluster.engine_client.front_request import (
    FrontRequest,
    Handover,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.front_requests import FrontRequests
from minfer.effects.cluster.engine_client.front_router import FrontRouter, routing_request
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.effects.cluster.engine_client.request_sender import (
    HANDED_OVER,
    SEARCH,
    RequestSender,
)
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashDenylist
from minfer.effects.live.client import TurnOutputs
from minfer.effects.live.live_requests import LiveRequests
from minfer.effects.live.request_names import search_of
from minfer.records.messages import Finished
from minfer.routing.messages import (
    Ended,
    Placed,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RoutingRequest,
    Started,
)


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
        self._replicas = replicas
        self.sender = RequestSender(live, self.requests, replicas)
        deliver: Callable[[Sequence[Assignment[FrontRequest]]], None] = self.sender.send
        spare = None  # a replica that computes prompts for others can decode, too
        if prefill is not None:
            spare = prefill.router
            deliver = partial(prefill.deliver, replicas, self.sender.send)
        self.dispatcher = None
        if router is not None:
            self.dispatcher = Dispatcher(router, deliver, spare=spare)

    def submit(self, each: Iterable[FrontRequest]) -> None:
        """Send requests that are on no replica to replicas, those of one replica
        together, or have them wait.
        """
        if self.dispatcher is None:
            (only,) = self._replicas
            if only.send is not None:
                free = not only.probing
                self.sender.send_to(
                    only, [kept for kept in each if self._runs_alone(kept) or free]
                )
            return
        alone: list[FrontRequest] = []
        due: list[Waiting[FrontRequest]] = []
        for kept in each:
            if self._runs_alone(kept):
                alone.append(kept)
            elif not self._must_wait(kept):
                due.append(Waiting(kept, _asked(kept)))
        if alone and (isolation := self._isolation()) is not None:
            self.sender.send_to(isolation, alone)
        self.dispatcher.submit(self._without_searches(due))

    def place_waiting(self) -> None:
        """Send the requests that wait here to replicas that take them now."""
        unplaced = self.requests.unplaced
        if self.dispatcher is None:
            self.submit(list(unplaced.values()))
            return
        for name, kept in unplaced.items():
            if self._runs_alone(kept) or self._must_wait(kept):
                self.dispatcher.remove(name)
        self.submit(self._held())
        self.dispatcher.wake()

    def note_time(self) -> None:
        """Send the requests that waited for an engine which has not started in time, or
        for the end of their client's isolation.
        """
        if self._held():
            self.place_waiting()

    def _held(self) -> list[FrontRequest]:
        """Returns the requests that wait here, and not for the dispatcher."""
        unplaced, dispatcher = self.requests.unplaced, self.dispatcher
        return [
            kept
            for name, kept in unplaced.items()
            if dispatcher is None or not dispatcher.has(name)
        ]

    def resumed_by(self, replica: ReplicaLink) -> tuple[wire.Resumed, ...]:
        """Returns the requests that wait for the next engine, which is this one."""
        every = list(self.requests.unplaced.values())
        if replica.elsewhere:  # its engine may serve others
            return ()
        alone = [kept for kept in every if self._runs_alone(kept)]
        if self.router is not None:
            if self._isolation() is not replica:
                return ()
            every = alone
        each = [self.sender.resume(kept, replica.number) for kept in every]
        return tuple(resumed for parts in each for resumed in parts)

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
                for router in () if self.dispatcher is None else self.dispatcher.routers:
                    router.settle(Ended(kept.request.id))
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
            handover = None if kept is None else self.prefill.handover_of(kept, done)
            if kept is None or handover is None:
                left.append(done)
            else:
                self._decode(kept, handover, done, self.prefill)
        return evolve(outputs, finished=tuple(left))

    def _decode(
        self,
        kept: FrontRequest,
        handover: Handover,
        done: Finished,
        prefill: PrefillFirst,
    ) -> None:
        """Have a request decoded by its target, or, if that is gone, placed again."""
        target = self._replicas[handover.target]
        if handover.cached is None:
            handover.cached = done.cached
        self.requests.leave(kept)
        prefill.router.settle(Ended(done.id))
        if kept.ends_without_engine():
            return  # it has to end, which the caller reports
        if not target.takes_requests:
            self.place_waiting()
            return
        if done.reason == "length":  # else it was refused there
            handover.stage = HandoverStage.DECODE
            prefill.handed_over += 1
        asked = _asked(kept)
        blocks, tokens = len(asked.keys), asked.tokens
        placed = Placed(asked.id, target.name, HANDED_OVER, handover.held, blocks, tokens)
        self.sender.send([Assignment(kept, asked, placed)])

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

    def note_progress(self, ended: Sequence[str]) -> None:
        """Note which requests have ended, and those whose first tokens came: others may
        have waited for that.
        """
        started, self.requests.started = self.requests.started, []
        if self.dispatcher is not None:
            for name in ended:
                self.dispatcher.remove(name)
            self.dispatcher.settle(*map(Started, started), *map(Ended, ended))

    # --- decisions ----------------------------------------------------------------------

    def _without_searches(
        self, due: Iterable[Waiting[FrontRequest]]
    ) -> list[Waiting[FrontRequest]]:
        """Send the next rounds of beam searches to the replicas that had the last ones,
        if these take requests; returns all other requests.
        """
        left: list[Waiting[FrontRequest]] = []
        assigned: list[Assignment[FrontRequest]] = []
        for waiting in due:
            request = waiting.item.request
            search = (
                "" if request.continuation.beam_round is None else search_of(request.id)
            )
            number = self.requests.searches.get(search)
            home = None if number is None else self._replicas[number]
            router = None if home is None else self.router_of(home)
            if home is None or router is None or not home.takes_requests:
                left.append(waiting)
            else:
                placed = router.dispatch(waiting.request, home.name, SEARCH)
                assigned.append(Assignment(waiting.item, waiting.request, placed))
        if assigned:
            self.sender.send(assigned)
        return left

    def _runs_alone(self, kept: FrontRequest) -> bool:
        """Returns whether a request must run alone."""
        kept.isolated = self.denylist.isolates(kept.request.client)
        return kept.runs_alone

    def _must_wait(self, kept: FrontRequest) -> bool:
        """Returns whether a request must wait: it may have killed an engine, and no
        replica may be lost now.
        """
        return bool(kept.deaths) and not self._may_lose_one()

    def _isolation(self) -> ReplicaLink | None:
        """Returns the replica on which requests run alone, if it has a link: of this
        server, the first that has an engine or is about to have one, so that all fronts
        choose the same. None: suspects wait until a second replica takes requests, for
        the others.
        """
        now = self._clock()
        local = [link for link in self._replicas if not link.elsewhere]
        able = [link for link in local if link.takes_requests or link.will_take(now)]
        others = [link for link in able[1:] if link.takes_requests]
        found = able[0] if able and (others or len(able) == 1) else None
        return None if found is None or found.send is None else found

    def _may_lose_one(self) -> bool:
        """Returns whether a replica may be lost: another one serves, or waiting for a
        second one is useless, as none will start.
        """
        now = self._clock()
        if sum(link.takes_requests for link in self._replicas) > 1:
            return True
        return not any(link.will_take(now) for link in self._replicas)


def _asked(kept: FrontRequest) -> RoutingRequest:
    """Returns what the router must know of a request."""
    return routing_request(kept.request, kept.record.session)
