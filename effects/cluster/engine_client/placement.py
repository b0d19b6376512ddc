"""Which of an API server's requests goes to which replica of the engine, and their moves.

    submit --> dispatcher --> `prefill_first` --> `request_sender` --> a replica's link
       ^           |            (if prompts are computed by some
       |           |             replicas, and outputs by others)
       |           +--> waits there: the policy defers it, or no replica takes requests
       +--> held here, as below
       +--- on no replica again: its replica died, or serves another one alone; resumed
            on another one, with its tokens as history

Theory. A request can go anywhere at any time, as the API server has all of it. When a
replica is gone, the requests that waited in its queue go to the others at once. Those
that it was serving do so if two others take requests; else they are held until two
replicas do (or no other one will: `ReplicaLink.will_take`). For one of them may be the
cause, and kill the next replica as well; then there is still one that serves. All that
were there both times are suspects (`quarantine`). A suspect runs alone, on the first
replica of this server, at a time when another one takes requests: what runs there leaves
it, and goes to the others. If its engine crashes then, too, the suspect is ended, and
refused for a while (`crash_denylist`).

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
from minfer.effects.cluster.engine_client.api_server_request import (
    ApiServerRequest,
    Handover,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.api_server_requests import ApiServerRequests
from minfer.effects.cluster.engine_client.api_server_router import (
    ApiServerRouter,
    routing_request,
)
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
from minfer.effects.live.request_names import search_of
from minfer.effects.live.request_registry import RequestRegistry
from minfer.records.messages import Finished
from minfer.routing.messages import (
    Placed,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RoutingRequest,
)


class Placement:
    """The requests of an API server, on their replicas; without a router, on the only
    one.
    """

    def __init__(
        self,
        live: RequestRegistry,
        replicas: Sequence[ReplicaLink],
        router: ApiServerRouter | None,
        prefill: PrefillFirst | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.denylist = CrashDenylist(clock)
        self._clock = clock
        self.requests = ApiServerRequests(live)
        self.router = router
        self.prefill = prefill  # if prompts are computed by some, and outputs by others
        self._replicas = replicas
        self.sender = RequestSender(live, self.requests, replicas)
        deliver: Callable[[Sequence[Assignment[ApiServerRequest]]], None] = (
            self.sender.send
        )
        spare = None  # a replica that computes prompts for others can decode, too
        if prefill is not None:
            spare = prefill.router
            deliver = partial(prefill.deliver, replicas, self.sender.send)
        self.dispatcher = None
        if router is not None:
            self.dispatcher = Dispatcher(router, deliver, fallback_router=spare)

    def submit(self, request_states: Iterable[ApiServerRequest]) -> None:
        """Send requests that are on no replica to replicas, those of one replica
        together, or have them wait.
        """
        if self.dispatcher is None:
            (link,) = self._replicas
            if link.send is not None:
                is_free = not link.probing
                self.sender.send_to(
                    link,
                    [
                        request_state
                        for request_state in request_states
                        if self._runs_alone(request_state) or is_free
                    ],
                )
            return
        solo: list[ApiServerRequest] = []
        routable: list[Waiting[ApiServerRequest]] = []
        for request_state in request_states:
            if self._runs_alone(request_state):
                solo.append(request_state)
            elif not self._must_wait(request_state):
                routable.append(
                    Waiting(request_state, _routing_request_of(request_state))
                )
        if solo and (isolation := self._isolation()) is not None:
            self.sender.send_to(isolation, solo)
        self.dispatcher.submit(self._without_searches(routable))

    def place_waiting(self) -> None:
        """Send the requests that wait here to replicas that take them now."""
        unplaced = self.requests.unplaced
        if self.dispatcher is None:
            self.submit(list(unplaced.values()))
            return
        for name, request_state in unplaced.items():
            if self._runs_alone(request_state) or self._must_wait(request_state):
                self.dispatcher.remove(name)
        self.submit(self._undispatched())
        self.dispatcher.wake()

    def note_time(self) -> None:
        """Send the requests that waited for an engine which has not started in time, or
        for the end of their client's isolation.
        """
        if self._undispatched():
            self.place_waiting()

    def _undispatched(self) -> list[ApiServerRequest]:
        """Returns the requests that wait here, and not for the dispatcher."""
        unplaced, dispatcher = self.requests.unplaced, self.dispatcher
        return [
            request_state
            for name, request_state in unplaced.items()
            if dispatcher is None or not dispatcher.has(name)
        ]

    def resumed_by(self, replica: ReplicaLink) -> tuple[wire.Resumed, ...]:
        """Returns the requests that wait for the next engine, which is this one."""
        waiting = list(self.requests.unplaced.values())
        if replica.is_external:  # its engine may serve others
            return ()
        solo = [
            request_state for request_state in waiting if self._runs_alone(request_state)
        ]
        if self.router is not None:
            if self._isolation() is not replica:
                return ()
            waiting = solo
        resumptions = [
            self.sender.resume(request_state, replica.number) for request_state in waiting
        ]
        return tuple(resumed for resumption in resumptions for resumed in resumption)

    def move_others(self, replica: ReplicaLink) -> None:
        """Take all requests from a replica but the one that it serves alone, and those
        that it holds until they run alone.
        """
        names = list[str]()
        for request_state in self.requests.on(replica.number):
            if replica.probing in request_state.names:
                request_state.waits_alone = False
            elif not request_state.waits_alone:
                names += self.requests.leave(request_state)
                for router in () if self.dispatcher is None else self.dispatcher.routers:
                    router.settle(RequestEnded(request_state.request.id))
        if names and replica.send is not None:
            replica.send(wire.CancelRequests(tuple(names)))

    def hand_over(self, outputs: TurnOutputs) -> TurnOutputs:
        """Send requests whose prompts are computed to the replicas that decode them;
        returns the outputs without the ends of these prefills.
        """
        if self.prefill is None or not outputs.finished:
            return outputs
        other_ends = list[Finished]()
        for end in outputs.finished:
            request_state = self.requests.get(end.id)
            handover = (
                None
                if request_state is None
                else self.prefill.handover_of(request_state, end)
            )
            if request_state is None or handover is None:
                other_ends.append(end)
            else:
                self._decode(request_state, handover, end, self.prefill)
        return evolve(outputs, finished=tuple(other_ends))

    def _decode(
        self,
        request_state: ApiServerRequest,
        handover: Handover,
        end: Finished,
        prefill: PrefillFirst,
    ) -> None:
        """Have a request decoded by its target, or, if that is gone, placed again."""
        target = self._replicas[handover.target]
        if handover.cached is None:
            handover.cached = end.cached
        self.requests.leave(request_state)
        prefill.router.settle(RequestEnded(end.id))
        if request_state.ends_without_engine():
            return  # it has to end, which the caller reports
        if not target.takes_requests:
            self.place_waiting()
            return
        if end.reason == "length":  # else it was refused there
            handover.stage = HandoverStage.DECODE
            prefill.handed_over += 1
        routing = _routing_request_of(request_state)
        blocks, tokens = len(routing.keys), routing.tokens
        placed = Placed(
            routing.id, target.name, HANDED_OVER, handover.target_blocks, blocks, tokens
        )
        self.sender.send([Assignment(request_state, routing, placed)])

    # --- what the router must know ------------------------------------------------------

    def router_of(self, replica: ReplicaLink) -> ApiServerRouter | None:
        """Returns the router among replicas with the role of this one, if any."""
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
            self.dispatcher.settle(
                *map(RequestStarted, started), *map(RequestEnded, ended)
            )

    # --- decisions ----------------------------------------------------------------------

    def _without_searches(
        self, requests: Iterable[Waiting[ApiServerRequest]]
    ) -> list[Waiting[ApiServerRequest]]:
        """Send the next rounds of beam searches to the replicas that had the last ones,
        if these take requests; returns all other requests.
        """
        others: list[Waiting[ApiServerRequest]] = []
        assigned: list[Assignment[ApiServerRequest]] = []
        for waiting in requests:
            request = waiting.item.request
            search = (
                "" if request.continuation.beam_round is None else search_of(request.id)
            )
            number = self.requests.searches.get(search)
            home = None if number is None else self._replicas[number]
            router = None if home is None else self.router_of(home)
            if home is None or router is None or not home.takes_requests:
                others.append(waiting)
            else:
                placed = router.dispatch(waiting.request, home.name, SEARCH)
                assigned.append(Assignment(waiting.item, waiting.request, placed))
        if assigned:
            self.sender.send(assigned)
        return others

    def _runs_alone(self, request_state: ApiServerRequest) -> bool:
        """Returns whether a request must run alone."""
        request_state.isolated = self.denylist.isolates(request_state.request.client)
        return request_state.runs_alone

    def _must_wait(self, request_state: ApiServerRequest) -> bool:
        """Returns whether a request must wait: it may have killed an engine, and no
        replica may be lost now.
        """
        return bool(request_state.deaths) and not self._may_lose_one()

    def _isolation(self) -> ReplicaLink | None:
        """Returns the replica on which requests run alone, if it has a link: of this
        server, the first that has an engine or is about to have one, so that all API
        servers choose the same. None: suspects wait until a second replica takes
        requests, for the others.
        """
        now = self._clock()
        own_links = [link for link in self._replicas if not link.is_external]
        candidates = [
            link for link in own_links if link.takes_requests or link.will_take(now)
        ]
        serving = [link for link in candidates[1:] if link.takes_requests]
        isolation = (
            candidates[0] if candidates and (serving or len(candidates) == 1) else None
        )
        return None if isolation is None or isolation.send is None else isolation

    def _may_lose_one(self) -> bool:
        """Returns whether a replica may be lost: another one serves, or waiting for a
        second one is useless, as none will start.
        """
        now = self._clock()
        if sum(link.takes_requests for link in self._replicas) > 1:
            return True
        return not any(link.will_take(now) for link in self._replicas)


def _routing_request_of(request_state: ApiServerRequest) -> RoutingRequest:
    """Returns what the router must know of a request."""
    return routing_request(request_state.request, request_state.record.session)
