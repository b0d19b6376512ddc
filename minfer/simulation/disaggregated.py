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

from collections.abc import Iterator
from typing import Final

from attrs import define, evolve, field, frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Emit, Finished, Submit
from minfer.records.request import KvTransfer, Request
from minfer.records.state import Turn
from minfer.routing.messages import Ended, Placed, RouterEvent, Started
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
    held: int  # blocks of its prompt that the target has cached
    cancelled: bool = False

    def rest(self, tokens: tuple[int, ...]) -> Request:
        """The request for the decode replica, after these tokens of the prefill replica.
        No tokens: that refused it, and the decode replica gets the request unchanged.
        """
        if not tokens:
            return self.request
        output, keys = self.request.output + tokens, self.request.keys
        return evolve(
            self.request,
            output=output,
            kv_transfer=KvTransfer(num_stored_blocks=len(keys), first_block=self.held),
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
        self._replicas |= self._started(self.prefill, self.prefill_config)
        self.prefill_state = joined(self.prefill_router, self.prefill)

    def _arrive(
        self, time: float, what: Request | Cancel, due: dict[str, float]
    ) -> Iterator[RoutedArrival]:
        if isinstance(what, Cancel) and what.id in self._halves:
            half = self._halves[what.id]
            self._halves[what.id] = evolve(half, cancelled=True)
        yield from super()._arrive(time, what, due)

    def _home(self, request: str) -> str | None:
        half = self._halves.get(request)
        return super()._home(request) if half is None else half.replica

    def _route(
        self, time: float, request: Request, due: dict[str, float]
    ) -> RoutedArrival:
        """Choose a decode replica. If that lacks more than `direct` tokens of the prompt,
        and the request yields more than one token, first send it to a prefill replica.
        """
        asked = routing_request(request)
        decode = route(self.router, self.state, asked)
        placed = decode.reason
        if not isinstance(placed, Placed):
            return super()._route(time, request, due)
        lengths = self.lengths or {}
        most = lengths.get((request.id, 0), request.max_tokens) - len(request.output)
        if placed.prefill <= self.direct or request.n > 1 or most < 2:
            return super()._route(time, request, due)
        first = route(self.prefill_router, self.prefill_state, asked)
        if first.replica is None:  # then the decode replica computes the prompt
            return super()._route(time, request, due)
        self.state, self.prefill_state = decode.state, first.state
        half = _FirstHalf(request, first.replica, placed.replica, placed.hit)
        self._halves[request.id] = half
        self._replicas[first.replica].unstarted.add(request.id)
        one = evolve(request, max_tokens=len(request.output) + 1)
        self._send(first.replica, time, Submit(one), due)
        return RoutedArrival(time, request, first)

    def _turn(
        self, replica: SimulatedReplica, now: float, due: dict[str, float]
    ) -> Iterator[ReplicaTurn | RoutedArrival]:
        if replica.name not in self.prefill_state.replicas:
            yield from super()._turn(replica, now, due)
            return
        turn = replica.turn(now)
        due[replica.name] = replica.due
        events = self._events(self.prefill_config, replica, turn, now)
        both: list[RouterEvent] = [one for one in events if isinstance(one, Started)]
        for done, tokens in _ended(turn):
            half = self._halves.pop(done.id)
            if half.cancelled or done.reason not in ("length", "rejected"):
                both.append(Ended(done.id))
                continue
            if not tokens:
                self._replicas[half.target].unstarted.add(done.id)
            self._send(half.target, now, Submit(half.rest(tokens)), due)
        state = apply(self.prefill_router, self.prefill_state, tuple(events)).state
        self.prefill_state = state
        self.state = apply(self.router, self.state, tuple(both)).state
        yield ReplicaTurn(replica.name, turn)
        if self._deferred and both:
            yield from self._route_deferred(now, due)


def _ended(turn: Turn) -> Iterator[tuple[Finished, tuple[int, ...]]]:
    """The samples that ended in a turn, each with its tokens of that turn."""
    for command in turn.transition.commands:
        if isinstance(command, Emit):
            tokens = dict(zip(command.ids, command.tokens, strict=True))
            for done in command.finished:
                yield done, tuple(tokens.get((done.id, done.sample), ()))
