"""One simulated run of `minfer simulate`: an engine, or replicas behind a router."""

import argparse
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from attrs import evolve
from tqdm import tqdm

from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.policy_overrides import (
    counts_of,
    warn_of_overrides,
    without_python_warnings,
)
from minfer.effects.runs.report import Report, combined_figures
from minfer.effects.runs.simulate_drafts import draft_results
from minfer.effects.runs.simulate_options import DEFAULT_ROUTING, Case
from minfer.journal.overrides import OverrideCounts
from minfer.policies.builtin import POLICIES, policy_named
from minfer.records.config import SIZES
from minfer.records.request import Request
from minfer.routing.policies import Prefix, routing_policy_named
from minfer.routing.state import RouterConfig
from minfer.simulation.cost import CostModel
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaSteadyTurns,
    RoutedArrival,
)
from minfer.simulation.simulate import Arrival, Simulated, Simulation

Figures = dict[str, Any]


def run(
    trace: ArrivalTrace,
    case: Case,
    cost: CostModel,
    options: argparse.Namespace,
    mix: int | None = None,
    *,
    name: str | None = None,
) -> Figures:
    """Simulate the trace once, with clients drawn by the seed `mix`; returns the settings
    and the results. `name` is that of the run in a warning of policy overrides; None
    gives none.
    """
    config = case.config
    settings = _settings(case, options)
    overrides = counts_of(config.policy, strict=options.strict_policy)
    arrivals = trace.arrivals(config.block_size, case.speed, mix)
    shown = tqdm(
        arrivals, settings["policy"], len(trace.sizes), leave=False, disable=None
    )
    begin = time.perf_counter()
    with paused_collector(), without_python_warnings():
        if options.replicas > 1:
            figures = _run_replicas(trace, case, cost, options, overrides, shown)
        else:
            figures = _run_engine(trace, case, cost, options, overrides, shown, settings)
    if name is not None:
        warn_of_overrides(name, config.policy, overrides)
    return {**settings, **figures, "simulated_in": time.perf_counter() - begin}


def policy_name(case: Case, options: argparse.Namespace) -> str:
    """The name of a case's policy, as the options give it."""
    policy = case.config.policy
    names = options.scheduling_policy or ()
    named = (name for name in names if policy_named(name) == policy)
    usual = (name for name, kind in POLICIES.items() if kind is type(policy))
    return next(chain(named, usual), type(policy).__name__)


def _settings(case: Case, options: argparse.Namespace) -> Figures:
    """The settings of a case, as results show them."""
    config = case.config
    sizes = {size: getattr(config, size) for size in SIZES}
    settings = {"policy": policy_name(case, options), **sizes, "speed": case.speed}
    if config.speculation is not None or options.num_speculative_tokens is not None:
        settings["drafts"] = config.speculation.drafts if config.speculation else 0
    return settings


def _run_engine(
    trace: ArrivalTrace,
    case: Case,
    cost: CostModel,
    options: argparse.Namespace,
    overrides: OverrideCounts,
    arrivals: Iterable[Arrival],
    settings: Figures,
) -> Figures:
    """The figures of one engine; with `--journal`, its turns are stored."""
    config = case.config
    report = Report(config, options.slo_ttft, options.slo_tpot, overrides=overrides)
    guesses = draft_results(options, trace)
    simulation = Simulation(
        config,
        Simulated(trace.lengths, guesses=guesses),
        cost,
        report.note_arrivals(arrivals),
        guesses=guesses,
    )
    if options.journal is None:
        report.fold_spans(simulation.spans())
    else:
        options.journal.mkdir(parents=True, exist_ok=True)
        path = options.journal / f"{'-'.join(map(str, settings.values()))}.journal"
        origin = {"simulated": options.trace, "cost": cost.name}
        write_journal(path, config, report.fold_turns(simulation.turns()), origin)
    return report.figures()


def _run_replicas(
    trace: ArrivalTrace,
    case: Case,
    cost: CostModel,
    options: argparse.Namespace,
    overrides: OverrideCounts,
    arrivals: Iterable[Arrival],
) -> Figures:
    """The figures of replicas together. A request's time begins as it reaches the
    router.
    """
    config, routing = case.config, options.routing or DEFAULT_ROUTING
    reports = {
        f"replica-{number}": Report(
            config, options.slo_ttft, options.slo_tpot, overrides=overrides
        )
        for number in range(options.replicas)
    }
    times = dict[str, float]()
    simulation = ReplicaSimulation(
        config,
        router_of(routing, cost, config.block_size),
        tuple(reports),
        cost,
        _noted(arrivals, times),
        trace.lengths,
    )
    num_unrouted = _fold_replicas(simulation, reports, times)
    figures = combined_figures([*reports.values()])
    figures["unfinished"] += num_unrouted
    return {"replicas": options.replicas, "routing": routing, **figures}


def _fold_replicas(
    simulation: ReplicaSimulation, reports: dict[str, Report], times: dict[str, float]
) -> int:
    """Fold a simulation to the reports of its replicas; `times` are those of arrivals.
    Returns the number of requests that no replica got.
    """
    unrouted = set[str]()
    for item in simulation.spans():
        if isinstance(item, RoutedArrival):
            name = item.request.id
            if item.routed.replica is None:
                unrouted.add(name)
                continue
            unrouted.discard(name)
            reports[item.routed.replica].note_arrival(name, times.pop(name))
        elif isinstance(item, ReplicaSteadyTurns):
            reports[item.replica].fold_steady(item.turns)
        else:
            reports[item.replica].fold(item.turn)
    return len(unrouted)


def router_of(name: str, cost: CostModel, block_size: int) -> RouterConfig:
    """The router with the policy of that name, which expects the costs of steps that are
    simulated. Raises ConfigError.
    """
    policy = routing_policy_named(name)
    if isinstance(policy, Prefix):
        policy = evolve(policy, token=cost.token, row=cost.sequence)
    return RouterConfig(policy, block_size)


def _noted(arrivals: Iterable[Arrival], times: dict[str, float]) -> Iterator[Arrival]:
    """Pass arrivals on, and note their times."""
    for arrival_time, event in arrivals:
        if isinstance(event, Request):
            times[event.id] = arrival_time
        yield arrival_time, event
