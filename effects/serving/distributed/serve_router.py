"""A request router of Ray Serve that chooses replicas as `minfer route` chooses servers:
by what is assumed to be cached, and waits, there.

    update_replicas          a replica joins, leaves, or has reported its load
    choose_replicas          route: the chosen one first, then, if that is full, another
    on_request_routed        it was another one
    on_request_completed     the request has ended

Each handle to the deployment has a router of its own, in its own process; what others
send is known by the loads that replicas report. Ray Serve says nothing of an answer's
first token. So the prefill of a request counts until its replica reports, and no request
is deferred for its tenant's sake: within a replica, shares are the engine's to keep.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from attrs import evolve
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from minfer.effects.serving.router.dispatcher import Dispatcher
from minfer.effects.serving.router.prompt_keys import BLOCK_TOKENS
from minfer.effects.serving.router.request_reader import RequestReader
from minfer.effects.serving.router.router_options import CACHE_TOKENS, MAX_BODY
from minfer.routing.messages import LoadReport, RoutingRequest
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig

NUMBER: Final = "number"  # of a report, in what a replica records


class MinferRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """The router of a handle to engines (`serve_engine`)."""

    def initialize_state(self, policy: str = "prefix") -> None:
        """Begin without replicas. Raises ConfigError if there is no such policy."""
        config = RouterConfig(routing_policy_named(policy), BLOCK_TOKENS)
        self._dispatcher = Dispatcher(
            config, cache_blocks=CACHE_TOKENS // BLOCK_TOKENS, most_waiting=0
        )
        self._reader = RequestReader(MAX_BODY)
        self._requests: dict[str, RoutingRequest] = {}  # those that have not ended
        self._reports: dict[str, int] = {}  # the number of each replica's last one

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take the replicas that there are, and their loads."""
        super().update_replicas(replicas)
        there = {one.replica_id.unique_id: one.routing_stats for one in replicas}
        for name in self._dispatcher.state.names:
            if name not in there:
                self._leave(name)
        for name, stats in there.items():
            self._dispatcher.join(name)
            number = stats.get(NUMBER, 0)
            if number != self._reports.get(name, 0):
                self._reports[name] = number
                load = {key: value for key, value in stats.items() if key != NUMBER}
                self._dispatcher.report(name, LoadReport(**load))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take a replica that is gone out at once."""
        super().on_replica_actor_died(replica_id)
        self._leave(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica of a request, and those to take if that has no room."""
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        if pending_request is None or not named:
            return [[*named.values()]]
        request = await self._read(pending_request)
        end = partial(self._note_cancelled, request.id)
        pending_request.future.add_done_callback(end)
        home = _home_of(pending_request)
        if home in named:
            self._dispatcher.send_to(home, request)
            return [[named[home]]]
        for name in named.keys() - {*self._dispatcher.state.names}:
            self._dispatcher.join(name)
        name = await self._dispatcher.place(request)
        chosen = named.pop(name, None)
        return [[] if chosen is None else [chosen], [*named.values()]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Count a request where it is, if it was not chosen for it."""
        del result
        request = self._requests.get(pending_request.metadata.internal_request_id)
        name = replica_id.unique_id
        if name not in self._dispatcher.state.names or request is None:
            return
        if self._home(request.id) != name:
            self._dispatcher.send_to(name, request)

    def on_request_completed(
        self, replica_id: ReplicaID, internal_request_id: str
    ) -> None:
        """A request has ended there, or was refused there and goes elsewhere."""
        if self._home(internal_request_id) in (None, replica_id.unique_id):
            self._end(internal_request_id)

    async def _read(self, pending: PendingRequest) -> RoutingRequest:
        """What must be known of a request; of a call that is none, its id alone."""
        name = pending.metadata.internal_request_id
        if name not in self._requests:
            request = RoutingRequest(name, (), 0)
            # Whatever it was called with: an error here would stop Ray Serve's routing.
            with suppress(Exception):
                read = await self._reader.read(*pending.args[:2])
                request = evolve(read.routed, id=name, tenant="")
            self._requests[name] = request
        return self._requests[name]

    def _note_cancelled(self, name: str, future: Any) -> None:
        """A request was given up before it had a replica."""
        if future.cancelled():
            self._end(name)

    def _end(self, name: str) -> None:
        self._dispatcher.end(name)
        self._requests.pop(name, None)

    def _home(self, name: str) -> str | None:
        """The replica on which a request counts."""
        return self._dispatcher.state.requests.get(name)

    def _leave(self, name: str) -> None:
        self._dispatcher.leave(name)
        self._reports.pop(name, None)


def _home_of(pending: PendingRequest) -> str:
    """The replica that has what a request names, or nothing."""
    match pending.args:
        case [_, _, str() as home, *_]:
            return home
    return ""
