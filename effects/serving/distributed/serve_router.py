"""A request router of Ray Serve that chooses replicas as `minfer route` chooses servers:
by what a replica probably has in its prefix cache, and by its load.

    update_replicas          a replica joins, leaves, or has reported its load
    choose_replicas          route: the chosen replica first; if it is full, any other
    on_request_routed        the replica that took it, which may be another one
    on_request_completed     the request has ended

Each handle to the deployment has its own router, in its own process: it learns what other
routers send only from the loads that replicas report. Ray Serve does not tell a router of
an answer's first token. So the prefill of a request counts as load until the next report
of its replica, and fairness among tenants is left to the engines: no request is deferred.
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
from minfer.effects.serving.router.prompt_reader import PromptReader
from minfer.effects.serving.router.request_reader import RequestReader
from minfer.effects.serving.router.router_options import CACHE_TOKENS, MAX_BODY
from minfer.routing.messages import LoadReport, RoutingRequest
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig

NUMBER: Final = "number"  # key of a report's number, beside the fields of LoadReport


class MinferRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """The router of a handle to engines (`serve_engine`)."""

    def initialize_state(self, policy: str = "prefix") -> None:
        """Start with no replicas, and this policy. Raises ConfigError if there is none of
        that name.
        """
        config = RouterConfig(routing_policy_named(policy), BLOCK_TOKENS)
        self._dispatcher = Dispatcher(
            config, cache_blocks=CACHE_TOKENS // BLOCK_TOKENS, most_waiting=0
        )
        self._reader = RequestReader(MAX_BODY, PromptReader.start(None, workers=0))
        self._requests: dict[str, RoutingRequest] = {}  # those that have not ended
        self._reports: dict[str, int] = {}  # number of the last report, by replica

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take the current replicas, and their reports of load that are new."""
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
        """Remove a replica that has died, without waiting for `update_replicas`."""
        super().on_replica_actor_died(replica_id)
        self._leave(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica for a request, and then those to use if it has no room."""
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
        """Count a request at the replica that took it, if another one had been chosen."""
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
        """Stop counting a request at a replica: it ended there, or was refused there."""
        if self._home(internal_request_id) in (None, replica_id.unique_id):
            self._end(internal_request_id)

    async def _read(self, pending: PendingRequest) -> RoutingRequest:
        """The routing data of a request; if a call's arguments are no request, its id."""
        name = pending.metadata.internal_request_id
        if name not in self._requests:
            request = RoutingRequest(name, (), 0)
            # Arguments may be anything, and an error here would stop Ray Serve's routing.
            with suppress(Exception):
                read = await self._reader.read(*pending.args[:2])
                request = evolve(read.routed, id=name, tenant="")
            self._requests[name] = request
        return self._requests[name]

    def _note_cancelled(self, name: str, future: Any) -> None:
        """Forget a request that was cancelled before it had a replica."""
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
    """The name of the replica that holds what a request names, such as an earlier answer;
    empty if it names nothing.
    """
    match pending.args:
        case [_, _, str() as home, *_]:
            return home
    return ""
