"""Simulation of disaggregation: prompts are computed by some replicas, and outputs by
others, on one virtual clock.

    prefill replica                           decode replica
    the prompt, and the first token
    the first token: hand over -------------> the request with that token as history:
                                              it fetches the blocks that it lacks, and
                                              decodes

Theory. It is what the server does: the replica that will decode is chosen first, by what
it caches; if that lacks more than a few tokens of the prompt, another replica computes
it for one token, and the request goes on where it will decode, with that token. Blocks
are sent while the prompt is computed; what is left of that at the first token, and to
fetch them, is the cost of a load in the keyed tier of `config`, one load after the other
on each decode replica.
"""

from collections.abc import Iterator
from typing import Final

from attrs import define, evolve, field, frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Emit, Finished, Submit
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.routing.messages import Ended, Placed, RouterEvent, Started
from minfer.routing.router import apply, route
from minfer.routing.state import RouterConfig, RouterState
from minfer.runs.simulate_replicas import (
    ReplicaSimulation,
    ReplicaTurn,
    RoutedArrival,
    SimulatedReplica,
    joined,
    routing_request,
)

# Tokens of a prompt, at most, that a decode replica computes itself, as in the server.
DIRECT: Final = 256


@frozen
class _FirstHalf:
    """A request whose prompt is computed."""

    request: Request
    replica: str  # that computes it
    target: str  # that will decode
    held: int  # blocks that the target has
    cancelled: bool = False

    def rest(self, tokens: tuple[int, ...]) -> Request:
        """What is left to do after its first tokens; without any, it was refused."""
        if not tokens:
            return self.request
        output, keys = self.request.output + tokens, self.request.keys
        return evolve(
            self.request,
            output=output,
            stored=len(keys),
            sent_from=self.held,
            place=None,
        )


@define
class DisaggregatedSimulation(ReplicaSimulation):
    """Replicas that prefill, and `names`, which decode, with the configuration `config`,
    which has a keyed tier. `router` and `state` are those of the latter.
    """

    prefill: tuple[str, ...] = field(kw_only=True)  # names of replicas
    prefill_config: EngineConfig = field(kw_only=True)
    prefill_router: RouterConfig = field(kw_only=True)
    direct: int = field(default=DIRECT, kw_only=True)  # tokens
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
        """Route a request among those that decode, and then, if its prompt is long enough
        and it has more than one token to yield, among those that prefill.
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
        if first.replica is None:  # it computes its own prompts then
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
    """The requests of one sample that ended in a turn, with their tokens of that turn."""
    for command in turn.transition.commands:
        if isinstance(command, Emit):
            tokens = dict(zip(command.ids, command.tokens, strict=True))
            for done in command.finished:
                yield done, tuple(tokens.get((done.id, done.sample), ()))
