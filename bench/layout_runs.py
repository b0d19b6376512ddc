"""A layout of `bench.layouts` under a trace, on a virtual clock, and what becomes of its
requests.
"""

import math
import time
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy
from attrs import Factory, define, evolve, frozen

from bench.layout_costs import (
    BLOCK,
    GPUS,
    PROMPT,
    Layout,
    config_of,
    sent_seconds,
    steps_of,
)
from bench.results import show
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.records.messages import Admitted, Emit
from minfer.records.tiers import LOAD, ExternalStore
from minfer.routing.policies import Prefix, PrefixHash, RoundRobin
from minfer.routing.state import RouterConfig
from minfer.simulation.disaggregated import DisaggregatedSimulation
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaTurn,
    RoutedArrival,
)

MACHINES: Final = 16
TTFT: Final = 2.0  # seconds
TPOT: Final = 0.05  # seconds
WARM: Final = 0.25  # share of the requests
PERCENTILES: Final = (50, 90, 99)


def simulation(
    layout: Layout, trace: ArrivalTrace, speed: float, gpus: int
) -> ReplicaSimulation:
    """Engines on `gpus` GPUs, and a router that knows what they cost."""
    steps = steps_of(layout)
    token = steps.prefill / PROMPT
    policy = Prefix(token=token, row=steps.position * 12_000)
    # the trace's prompts share a first span of 512 tokens
    by_name = {"round_robin": RoundRobin(), "prefix_hash": PrefixHash(blocks=32)}
    router = RouterConfig(by_name.get(layout.routing, policy), BLOCK)
    engines = tuple(f"engine-{number:03}" for number in range(gpus // layout.ranks))
    config, cost = config_of(layout, layout.budget), steps.model(layout.name)
    arrivals = trace.arrivals(BLOCK, speed)
    if not layout.prefill:
        return ReplicaSimulation(
            config, router, engines, cost, arrivals, report_every=0.25
        )
    count = layout.prefill * gpus // GPUS
    block_seconds = sent_seconds(layout)
    tier = ExternalStore(
        max_known_keys=2 * config.num_blocks,
        push_only=True,
        choice=LOAD,
        page_seconds=block_seconds,
    )
    return DisaggregatedSimulation(
        evolve(config, external_store=tier),
        # a prompt that was computed elsewhere costs a decode engine its transfer
        RouterConfig(evolve(policy, token=block_seconds / BLOCK), BLOCK),
        engines[count:],
        cost,
        arrivals,
        report_every=0.25,
        prefill=engines[:count],
        prefill_config=config_of(layout, 8192),
        prefill_router=router,
    )


@frozen
class Served:
    """A request that was served: its times, and its tokens."""

    arrived: float
    first: float
    last: float
    tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds of each token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


class TooSlowError(Exception):
    """Too many requests have missed a limit: the rest does not matter."""


@define
class Outcome:
    """What becomes of each request, folded over a simulation. Raises TooSlowError once
    more than `max_failures` have missed a limit; the first `warm` do not count.
    """

    warm: int = 0
    max_failures: float = math.inf
    arrived: dict[str, float] = Factory(dict)
    first: dict[str, float] = Factory(dict)
    served: dict[str, Served] = Factory(dict)
    late: int = 0  # first tokens
    slow: int = 0  # requests
    asked: int = 0  # prompt tokens
    hits: int = 0  # of these, cached

    def see(self, run: Iterable[ReplicaTurn | RoutedArrival]) -> Self:
        """Fold all of a run."""
        for event in run:
            if isinstance(event, RoutedArrival):
                self.arrived.setdefault(event.request.id, event.time)
                continue
            for reason in event.turn.transition.reasons:
                if isinstance(reason, Admitted) and reason.id not in self.first:
                    self.asked += reason.prompt
                    self.hits += reason.cached
            for command in event.turn.transition.commands:
                if isinstance(command, Emit):
                    self._emit(command, event.turn.transition.state.time)
            if max(self.late, self.slow) > self.max_failures:
                raise TooSlowError
        return self

    def _emit(self, emit: Emit, now: float) -> None:
        first = self.first
        for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
            if tokens and name not in first:
                first[name] = now
                late = now - self.arrived[name] > TTFT
                self.late += late and int(name) >= self.warm
        for finished in emit.finished:
            began = first.get(finished.id, now)
            request = Served(self.arrived[finished.id], began, now, finished.length)
            self.served[finished.id] = request  # the second half of a request comes last
            self.slow += request.tpot > TPOT and int(finished.id) >= self.warm


def figures(
    layout: Layout,
    trace: ArrivalTrace,
    speed: float,
    machines: int = 1,
    percentile: int = 0,
) -> dict[str, Any]:
    """Simulate `machines` machines; rates are those of all 16. Raises TooSlowError if
    that percentile cannot keep the limits any more.
    """
    count = len(trace.rows)
    warm = int(WARM * count)
    outcome = Outcome(warm, (count - warm) * (1 - percentile / 100))
    begin = time.perf_counter()
    with paused_collector():
        outcome.see(simulation(layout, trace, speed, GPUS * machines).run())
    assert len(outcome.served) == count, "all are served"
    requests = [outcome.served[str(number)] for number in range(warm, count)]
    ttft = [request.ttft for request in requests]
    tpot = [request.tpot for request in requests if request.tokens > 1]
    span = max(request.arrived for request in requests) - min(
        request.arrived for request in requests
    )
    scale = MACHINES / machines
    good = [request.ttft <= TTFT and request.tpot <= TPOT for request in requests]
    result = {
        "layout": layout.name,
        "speed": speed,
        "requests/s": scale * (len(requests) - 1) / span,
        "output tokens/s": scale * sum(request.tokens for request in requests) / span,
        "ttft": spread(ttft),
        "tpot": spread(tpot),
        "good": sum(good) / len(good),
        "hit_share": outcome.hits / outcome.asked,
        "simulated_in": time.perf_counter() - begin,
    }
    show(result)
    return result


def spread(values: list[float]) -> dict[str, float]:
    percentiles = numpy.percentile(values, PERCENTILES)
    return {f"p{q}": float(v) for q, v in zip(PERCENTILES, percentiles, strict=True)}
