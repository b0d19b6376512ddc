"""Simulation of disaggregation: some replicas prefill and others decode, on one virtual
clock.

    prefill replica                           decode replica
    computes the prompt and one token
    hands over -----------------------------> gets the request with that token as history,
                                              fetches the KV blocks that it lacks, decodes

Theory. As in the server, the decode replica is chosen first, by its cached prefixes. If
it lacks more than `direct` tokens of the prompt, a prefill replica computes the prompt
and one token, and the request goes on at the decode replica with that token. The server
sends blocks while the prompt is computed. What of that remains at the first token is
modelled as loads from the external store of `config`, one after the other on each decode
replica.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from attrs import define, evolve, field, frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Emit, Finished, Submit
from minfer.records.request import KvTransfer, Request
from minfer.records.state import Turn
from minfer.routing.messages import Placed, RequestEnded, RequestStarted, RouterEvent
from minfer.routing.router import apply, route
from minfer.routing.state import RouterConfig, RouterState
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaTurn,
    RoutedArrival,
    SimulatedReplica,
    joined,
    routing_request,
)

# Most uncached prompt tokens that a decode replica computes itself, as in the server.
DIRECT: Final = 256


@frozen
class _FirstHalf:
    """A request at a prefill replica."""

    request: Request
    replica: str  # the prefill replica
    target: str  # the decode replica
    num_cached: int  # blocks of its prompt that the target has cached
    cancelled: bool = False

    def second_half(self, tokens: tuple[int, ...]) -> Request:
        """The request for the decode replica, after these tokens of the prefill replica.
        No tokens: that refused it, and the decode replica gets the request unchanged.
        """
        if not tokens:
            return self.request
        output, keys = self.request.output + tokens, self.request.keys
        return evolve(
            self.request,
            output=output,
            kv_transfer=KvTransfer(
                num_stored_blocks=len(keys), first_block=self.num_cached
            ),
            continuation=evolve(self.request.continuation, place=None),
        )


@define
class DisaggregatedSimulation(ReplicaSimulation):
    """Replicas `prefill`, and replicas `names`, which decode. `config`, `router` and
    `state` are those of the decode replicas; `config` must have an external store.
    """

    prefill: tuple[str, ...] = field(kw_only=True)  # names of the replicas that prefill
    prefill_config: EngineConfig = field(kw_only=True)
    prefill_router: RouterConfig = field(kw_only=True)
    direct: int = field(default=DIRECT, kw_only=True)  # tokens; see DIRECT
    prefill_state: RouterState = field(init=False)
    _halves: dict[str, _FirstHalf] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._replicas |= self._new_replicas(self.prefill, self.prefill_config)
        self.prefill_state = joined(self.prefill_router, self.prefill)

    def _arrive(
        self, time: float, arrival: Request | Cancel, due_times: dict[str, float]
    ) -> Iterator[RoutedArrival]:
        if isinstance(arrival, Cancel) and arrival.id in self._halves:
            half = self._halves[arrival.id]
            self._halves[arrival.id] = evolve(half, cancelled=True)
        yield from super()._arrive(time, arrival, due_times)

    def _senders(self, name: str) -> Iterable[str]:
        """Replicas that prefill send requests to those that decode."""
        if self._deferred or name in self.prefill_state.replicas:
            return super()._senders(name)
        return self.prefill

    def _apply(self, name: str, events: list[RouterEvent]) -> None:
        if name not in self.prefill_state.replicas:
            super()._apply(name, events)
            return
        state = apply(self.prefill_router, self.prefill_state, tuple(events)).state
        self.prefill_state = state

    def _replica_of(self, request_id: str) -> str | None:
        half = self._halves.get(request_id)
        return super()._replica_of(request_id) if half is None else half.replica

    def _route(
        self, time: float, request: Request, due_times: dict[str, float]
    ) -> RoutedArrival:
        """Choose a decode replica. If that lacks more than `direct` tokens of the prompt,
        and the request yields more than one token, first send it to a prefill replica.
        """
        router_request = routing_request(request)
        decode = route(self.router, self.state, router_request)
        placed = decode.reason
        if not isinstance(placed, Placed):
            return super()._route(time, request, due_times)
        lengths = self.lengths or {}
        length = lengths.get((request.id, 0), request.max_tokens)
        is_short = length - len(request.output) < 2
        if placed.prefill <= self.direct or request.n > 1 or is_short:
            return super()._route(time, request, due_times)
        prefill = route(self.prefill_router, self.prefill_state, router_request)
        if prefill.replica is None:  # then the decode replica computes the prompt
            return super()._route(time, request, due_times)
        self.state, self.prefill_state = decode.state, prefill.state
        half = _FirstHalf(request, prefill.replica, placed.replica, placed.hit)
        self._halves[request.id] = half
        self._replicas[prefill.replica].unstarted.add(request.id)
        prefill_request = evolve(request, max_tokens=len(request.output) + 1)
        self._send(prefill.replica, time, Submit(prefill_request), due_times)
        return RoutedArrival(time, request, prefill)

    def _turn(
        self, replica: SimulatedReplica, now: float, due_times: dict[str, float]
    ) -> Iterator[ReplicaTurn | RoutedArrival]:
        if replica.name not in self.prefill_state.replicas:
            yield from super()._turn(replica, now, due_times)
            return
        turn = replica.turn(now)
        due_times[replica.name] = replica.due
        events = self._events(self.prefill_config, replica, turn, now)
        decode_events: list[RouterEvent] = [
            event for event in events if isinstance(event, RequestStarted)
        ]
        for finished, tokens in _ended(turn):
            half = self._halves.pop(finished.id)
            if half.cancelled or finished.reason not in ("length", "rejected"):
                decode_events.append(RequestEnded(finished.id))
                continue
            if not tokens:
                self._replicas[half.target].unstarted.add(finished.id)
            self._send(half.target, now, Submit(half.second_half(tokens)), due_times)
        state = apply(self.prefill_router, self.prefill_state, tuple(events)).state
        self.prefill_state = state
        self.state = apply(self.router, self.state, tuple(decode_events)).state
        yield ReplicaTurn(replica.name, turn)
        if self._deferred and decode_events:
            yield from self._route_deferred(now, due_times)


def _ended(turn: Turn) -> Iterator[tuple[Finished, tuple[int, ...]]]:
    """The samples that ended in a turn, each with its tokens of that turn."""
    for command in turn.transition.commands:
        if isinstance(command, Emit):
            tokens = dict(zip(command.ids, command.tokens, strict=True))
            for finished in command.finished:
                yield finished, tuple(tokens.get((finished.id, finished.sample), ()))
