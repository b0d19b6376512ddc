"""Turns of a steady decode taken as one: the same turns, states and times as one by
one.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import Turn
from minfer.records.tiers import ExternalStore, HostTier
from minfer.routing.policies import LeastLoaded, Prefix
from minfer.routing.state import RouterConfig
from minfer.simulation.cost import CostModel
from minfer.simulation.disaggregated import DisaggregatedSimulation
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaSteadyTurns,
    ReplicaTurn,
    RoutedArrival,
)
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from minfer.simulation.steady import SteadyTurns
from tests.circles import seeds
from tests.core.simulation.test_simulate import EVEN, config_of, requested
from tests.core.world import some_speculation, tiny_config

UNEVEN = CostModel(
    name="as on a GPU",
    decode=((2, 0.7), (4, 1.1)),
    mixed=1.3,
    token=0.1,
    sequence=0.013,
    context=0.0007,
    host=0.03,
)


@frozen
class _AskedBudget(FirstCome):
    """A policy with a token budget of its own."""

    def budget(self, _: Any, load: Load) -> int:
        return load.budget


def each_turn(
    config: EngineConfig, spans: Iterable[Turn | SteadyTurns], counts: list[int]
) -> Iterator[Turn]:
    """Each turn of the spans; appends how many were taken as one."""
    for span in spans:
        if isinstance(span, Turn):
            yield span
            continue
        turn = None
        for turn in span.turns(config):
            yield turn
        assert turn is not None
        assert turn.transition.state == span.after
        counts.append(len(span.times))


def long_requests(rng: Random) -> tuple[list[Arrival], dict[SampleId, int]]:
    """Requests with outputs of several blocks; some end early, some are cancelled."""
    arrivals, lengths, time = list[Arrival](), dict[SampleId, int](), 0.0
    for number in range(rng.randint(2, 9)):
        time += rng.choice((0.0, 0.5, 3.0, 40.0))
        request = Request(
            id=str(number),
            prompt=tuple(rng.choices(range(5), k=rng.randint(1, 40))),
            max_tokens=rng.randint(1, 70),
            n=rng.choice((1, 1, 1, 2)),
            stop_ids=frozenset(rng.sample(range(6), k=rng.choice((0, 0, 1, 4)))),
        )
        arrivals.append((time, request))
        for sample in range(request.n):
            if rng.random() < 0.7:
                lengths[request.id, sample] = rng.randint(1, 70)
        if rng.random() < 0.2:
            time += rng.choice((0.0, 9.3))
            arrivals.append((time, Cancel(str(number))))
    return arrivals, lengths


def roomy_config(rng: Random) -> EngineConfig:
    """Configurations of all kinds in which decodes are steady for some turns."""
    config = evolve(
        tiny_config(rng),
        block_size=rng.choice((4, 16)),
        num_blocks=rng.choice((12, 40)),
        watermark=0,
        max_model_len=110,
        max_num_batched_tokens=64,
        speculation=some_speculation(rng) if rng.random() < 0.2 else None,
    )
    tier: dict[str, Any] = {"page_seconds": 0.3, "load_seconds": 0.2}
    if rng.random() < 0.3:
        config = evolve(config, host=HostTier(pages=20, **tier))
    if rng.random() < 0.2:
        config = evolve(config, external_store=ExternalStore(max_known_keys=90, **tier))
    if rng.random() < 0.4:
        config = evolve(config, itl_target=rng.choice((0.0, 1.5)), min_prefill_tokens=4)
    return config


@seeds(4, 1000)
def test_steady_turns_are_the_turns_taken_one_by_one(seeds: range) -> None:
    num_skipped = 0
    for seed in seeds:
        rng = Random(seed)
        config, cost = roomy_config(rng), rng.choice((EVEN, UNEVEN))
        cost = evolve(cost, overlaps=rng.random() < 0.7)
        arrivals, lengths = long_requests(rng)
        runs = [Simulation(config, Simulated(lengths), cost, arrivals) for _ in range(2)]
        counts = list[int]()
        found = [*each_turn(config, runs[0].spans(), counts)]
        assert found == [*runs[1].turns()], seed
        num_skipped += sum(counts)
    assert num_skipped > 10 * len(seeds)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": _AskedBudget()},  # it is asked in every turn
        {"vocab_size": 1},  # the token of other rows is none
    ],
)
def test_where_a_turn_may_differ_each_is_taken(changes: dict[str, Any]) -> None:
    config = evolve(config_of(), **changes)
    arrivals = [(0.0, requested("a", most=40, stop_ids=frozenset({0})))]
    runs = [Simulation(config, Simulated(), EVEN, arrivals) for _ in range(2)]
    assert [*runs[0].spans()] == [*runs[1].turns()]


def test_an_arrival_ends_a_span() -> None:
    """It enters the turn in which it would enter if each were taken."""
    arrivals = [(0.0, requested("a", most=50)), (10.0, requested("b", most=3))]
    config = config_of(block_size=64)
    spans = [*Simulation(config, Simulated(), EVEN, arrivals).spans()]
    [first, *_] = [span for span in spans if isinstance(span, SteadyTurns)]
    assert first.times == (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


def test_blocks_behind_a_fence_are_freed_in_a_span() -> None:
    """A sequence ends, and the step in flight after it frees its blocks."""
    arrivals = [(0.0, requested("a", most=50)), (0.0, requested("b", most=3))]
    config = config_of(block_size=64)
    spans = [*Simulation(config, Simulated(), EVEN, arrivals).spans()]
    steady = [span for span in spans if isinstance(span, SteadyTurns)]
    [first, *_] = [span for span in steady if span.before.fences]
    assert not first.after.fences
    [freed, *_] = first.turns(config)
    assert not freed.transition.state.fences


# --- replicas ---------------------------------------------------------------------------


def _by_replica(
    config: EngineConfig,
    items: Iterable[ReplicaTurn | ReplicaSteadyTurns | RoutedArrival],
) -> tuple[dict[str, list[Turn]], list[RoutedArrival], int]:
    """The turns of each replica, the arrivals, and how many turns were taken as one."""
    turns, routed, counts = dict[str, list[Turn]](), list[RoutedArrival](), list[int]()
    for item in items:
        match item:
            case RoutedArrival():
                routed.append(item)
            case ReplicaTurn(name, turn):
                turns.setdefault(name, []).append(turn)
            case ReplicaSteadyTurns(name, steady):
                turns.setdefault(name, []).extend(each_turn(config, [steady], counts))
    return turns, routed, sum(counts)


def _replicas(seed: int) -> ReplicaSimulation:
    rng = Random(seed)
    config = evolve(config_of(block_size=8, max_model_len=110, num_blocks=30))
    arrivals, lengths = long_requests(rng)
    arrivals = [
        (time / 9, evolve(what, n=1, client=rng.choice("xy")))
        for time, what in arrivals
        if isinstance(what, Request)
    ]
    # So short of patience and shares that requests are deferred.
    policy = rng.choice((LeastLoaded(), Prefix(token=0.1, row=0.01, least=8, patience=0)))
    router = RouterConfig(policy, 8)
    if rng.random() < 0.4:
        store = ExternalStore(max_known_keys=90, page_seconds=0.3, push_only=False)
        return DisaggregatedSimulation(
            evolve(config, external_store=store),
            router,
            ("a", "b"),
            UNEVEN,
            arrivals,
            lengths,
            prefill=("p",),
            prefill_config=config,
            prefill_router=router,
            direct=4,
        )
    report_every = rng.choice((5.0, float("inf")))
    names = ("a", "b", "c")
    return ReplicaSimulation(
        config, router, names, UNEVEN, arrivals, lengths, report_every
    )


@seeds(8, 600)
def test_steady_turns_of_replicas(seeds: range) -> None:
    num_skipped, num_deferred = 0, 0
    for seed in seeds:
        runs = [_replicas(seed) for _ in range(2)]
        config = runs[0].config
        turns, routed, skipped = _by_replica(config, runs[0].spans())
        each, each_routed, _ = _by_replica(config, runs[1].run())
        assert turns == each, seed
        assert routed == each_routed
        assert runs[0].state == runs[1].state
        num_skipped += skipped
        num_deferred += sum(item.routed.replica is None for item in routed)
    assert num_skipped > 10 * len(seeds)
    assert num_deferred > 0
