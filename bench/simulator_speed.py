"""How many requests a second of processor time are simulated: each turn by `engine.step`,
and turns of a steady decode as one.

The requests of traces, at several times their pace, on one engine, on one with a host
tier, and on four replicas with host tiers behind the router. Both ways must give the same
figures. Of the first requests, the digest of all decisions and times is compared, too: of
the turns that `step` took, and of those that stand for a span.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field

from bench.results import run, show, spread
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import Report, combined_figures
from minfer.effects.runs.simulate_run import router_of
from minfer.effects.runs.trace_files import read_trace
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.records.config import EngineConfig
from minfer.records.state import Turn
from minfer.records.tiers import HostTier
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaSteadyTurns,
    ReplicaTurn,
)
from minfer.simulation.simulate import Simulated, Simulation
from minfer.simulation.steady import SteadyTurns

BLOCKS: Final = 30_000
SETTINGS: Final = {"one": (1, False), "host tier": (1, True), "4, host tier": (4, True)}
# Of moving a block of 64 tokens of a 7B model over PCIe, and of computing a token.
TIER: Final = HostTier(
    pages=4 * BLOCKS, page_seconds=70e-6, token_seconds=19e-6, load_seconds=1e-4
)
Span = Turn | SteadyTurns


@define
class Digests:
    """A digest of the decisions and times of each replica."""

    config: EngineConfig
    by_replica: dict[str, bytes] = field(factory=dict)

    def fold(self, name: str, span: Span) -> None:
        """Fold each turn of a span."""
        turns = span.turns(self.config) if isinstance(span, SteadyTurns) else [span]
        for turn in turns:
            changes = compact(facts(turn.before, turn.transition))
            digest = self.by_replica.get(name, bytes(8))
            digest = extend_digest(digest, turn.transition, changes)
            moment = repr(turn.transition.state.time).encode()
            self.by_replica[name] = blake2b(digest + moment, digest_size=8).digest()


def spans_of(
    trace: ArrivalTrace, config: EngineConfig, replicas: int, speed: float, *, fast: bool
) -> Iterator[tuple[str, Span]]:
    """The turns of a simulation, each with its replica."""
    arrivals = trace.arrivals(config.block_size, speed)
    if replicas == 1:
        single = Simulation(config, Simulated(trace.lengths), H200, arrivals)
        turns: Iterable[Span] = single.spans() if fast else single.turns()
        yield from (("", turn) for turn in turns)
        return
    router = router_of("prefix", H200, config.block_size)
    names = tuple(f"replica-{number}" for number in range(replicas))
    several = ReplicaSimulation(config, router, names, H200, arrivals, trace.lengths)
    for item in several.spans() if fast else several.run():
        match item:
            case ReplicaTurn(name, turn):
                yield name, turn
            case ReplicaSteadyTurns(name, steady):
                yield name, steady


def simulate(
    trace: ArrivalTrace, replicas: int, host: bool, speed: float, *, fast: bool
) -> tuple[float, dict[str, Any]]:
    """Seconds of processor time, and the figures."""
    config, reports = config_of(trace, host=host), dict[str, Report]()
    begin = time.process_time()
    for name, span in spans_of(trace, config, replicas, speed, fast=fast):
        report = reports.setdefault(name, Report(config))
        if isinstance(span, SteadyTurns):
            report.fold_steady(span)
        else:
            report.fold(span)
    took = time.process_time() - begin
    return took, combined_figures([reports[name] for name in sorted(reports)])


def config_of(trace: ArrivalTrace, *, host: bool) -> EngineConfig:
    config = EngineConfig(
        num_blocks=BLOCKS,
        watermark=BLOCKS // 100,
        max_num_batched_tokens=8192,
        max_model_len=max(trace.sizes),
    )
    return evolve(config, host=TIER) if host else config


def digest(
    trace: ArrivalTrace, replicas: int, host: bool, speed: float, *, fast: bool
) -> str:
    config = config_of(trace, host=host)
    digests = Digests(config)
    for name, span in spans_of(trace, config, replicas, speed, fast=fast):
        digests.fold(name, span)
    found = digests.by_replica
    return " ".join(found[name].hex() for name in sorted(found))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = dict[str, Any]()
    speeds = [float(speed) for speed in args.speeds.split(",")]
    for path, speed, setting in product(args.traces, speeds, SETTINGS):
        replicas, host = SETTINGS[setting]
        first = read_trace(str(path), args.checked)
        both = (False, True)
        digests = {digest(first, replicas, host, speed, fast=fast) for fast in both}
        assert len(digests) == 1, (path, speed, setting)
        trace = read_trace(str(path), args.requests)
        rates: dict[str, list[float]] = {"each turn": [], "spans": []}
        for _ in range(args.rounds):
            seen = []
            for name, fast in (("each turn", False), ("spans", True)):
                took, figures = simulate(trace, replicas, host, speed, fast=fast)
                rates[name].append(len(trace.sizes) / took)
                seen.append(figures)
            assert seen[0] == seen[1], (path, speed, setting)
        result = {
            "requests_per_second": {name: spread(rates[name]) for name in rates},
            "turns": seen[0]["turns"],
            "running": seen[0]["running"],
            "digest": digests.pop(),
        }
        results.setdefault(Path(path).stem, {})[f"{setting}, {speed:g} x"] = result
        show({f"{Path(path).stem}, {setting}, {speed:g} x": result})
    return results


if __name__ == "__main__":
    run(
        "simulator_speed",
        measure,
        {
            "--traces": {"nargs": "+", "required": True, "help": "CSV or JSON lines"},
            "--requests": 1000,
            "--checked": 100,
            "--speeds": "1,8",
            "--rounds": 3,
        },
    )
