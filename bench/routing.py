"""The router over replicas: what a decision costs, and what each policy is worth.

`decisions`: 16 replicas with a million keys between them, a quarter of the documents
shared by all as far as their first blocks; the time of `route` per policy, of events, of
a replica's death, and the bytes of the index for each key. Times are the processor's: the
router waits for nothing, and what else the machine does is not its cost.

`traces`: the requests of Mooncake's conversation trace over 4 and 16 replicas, each a
simulation of the engine on the built-in cost model of a 7B on an H200, on one virtual
clock: share of prompt tokens that hit a cache, time to first token and between tokens.
Arrivals of 4 replicas are three times as fast as recorded, and four times: then replicas
do not keep up unless prefixes are found; likewise for 16. Replicas publish and evict keys
in every turn, and report their loads four times a second.

`tenants`: the first 900 of these requests over 4 replicas, eight times as fast, 60 % of
them of one tenant and the others of three: time to first token by tenant, with fair
shares of what waits and without.

`--part` measures one of these, and keeps the others of an earlier result.
"""

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from bench.results import percentiles, run, show
from minfer.blocks.keys import Keys
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import DurationHistogram, Report
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.request import Request
from minfer.routing.key_index import SHARDS
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RoutingRequest,
)
from minfer.routing.policies import (
    ROUTING_POLICIES,
    LeastLoaded,
    Prefix,
    PrefixHash,
    routing_policy_named,
)
from minfer.routing.router import apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState
from minfer.simulation.replicas import ReplicaSimulation, RoutedArrival

BLOCK: Final = 64  # tokens
KEYS: Final = 1_000_000
CHAIN: Final = 500  # keys of a document
REPLICAS: Final = 16
LIVE: Final = 256  # requests at any time
WAITING: Final = 32  # of these, at first
TENANT_REQUESTS: Final = 900
DECISIONS_PER_MEDIAN: Final = 250  # decisions that are timed together
# An H200's pool for a 7B, as in results/mooncake.json.
TRACE: Final = {  # an option
    "type": Path,
    "default": Path("mooncake_conversation.jsonl"),
    "help": "mooncake_conversation.jsonl",
}
ENGINE: Final = EngineConfig(
    num_blocks=27_000,
    block_size=BLOCK,
    max_model_len=131_072,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)


@frozen
class Load:
    """A trace over `replicas` replicas, `speed` times as fast as it was recorded."""

    replicas: int
    speed: float


LOADS: Final = (Load(4, 3.0), Load(4, 4.0), Load(16, 12.0), Load(16, 16.0))


def names(count: int) -> tuple[str, ...]:
    return tuple(f"replica-{number:02}" for number in range(count))


def policy_of(name: str) -> Any:
    """A policy; prompts of the trace share a first span of 512 tokens, and the hash takes
    as many more.
    """
    policy = routing_policy_named(name)
    return evolve(policy, blocks=32) if isinstance(policy, PrefixHash) else policy


# --- decisions --------------------------------------------------------------------------


def documents() -> list[Keys]:
    def key(*name: int) -> bytes:
        return sha256(str(name).encode()).digest()

    count = range(KEYS // CHAIN)
    return [tuple(key(number, position) for position in range(CHAIN)) for number in count]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


def filled(config: RouterConfig, all_keys: list[Keys], rng: random.Random) -> Any:
    """A router whose replicas have all documents, and how long a key took."""
    joined = tuple(map(ReplicaJoined, names(REPLICAS)))
    state = apply(config, initial_router(config), joined).state
    begin, before = time.thread_time(), resident()
    for number, keys in enumerate(all_keys):
        home = names(REPLICAS)[number % REPLICAS]
        state = apply(config, state, (BlocksPublished(home, keys),)).state
    figures = {
        "publish_us_per_key": 1e6 * (time.thread_time() - begin) / KEYS,
        "index_bytes_per_key": (resident() - before) / KEYS,
    }
    for keys in all_keys[::4]:
        prefixes = ((name, keys[: rng.randrange(20, 100)]) for name in names(REPLICAS))
        shared = tuple(BlocksPublished(name, prefix) for name, prefix in prefixes)
        state = apply(config, state, shared).state
    return state, figures


def asked(
    all_keys: list[Keys], rng: random.Random, count: int
) -> Iterator[RoutingRequest]:
    """Prompts of 50 to 500 cached blocks, and 20 that no replica has."""
    for number in range(count):
        cached = rng.choice(all_keys)[: rng.randrange(50, CHAIN)]
        # As they come from another process: no object of the index.
        keys = [bytes(bytearray(key)) for key in cached]
        keys += [rng.randbytes(32) for _ in range(20)]
        yield RoutingRequest(
            id=f"{number}",
            keys=tuple(keys),
            tokens=BLOCK * len(keys) + 5,
            tenant=f"{number % 5}",
            session=f"{number % 300}",
            output=200,
        )


def decided(
    config: RouterConfig, state: RouterState, all_keys: list[Keys], count: int
) -> dict[str, Any]:
    """The times of decisions, and of starts and ends beside them, in microseconds."""
    rng, waiting, running = random.Random(1), deque[str](), list[str]()
    took, events = list[float](), list[float]()
    for request in asked(all_keys, rng, count):
        begin = time.thread_time()
        routed = route(config, state, request)
        took.append(1e6 * (time.thread_time() - begin))
        state = routed.state
        if routed.replica is not None:
            waiting.append(request.id)
        if len(waiting) + len(running) > LIVE:
            running.append(waiting.popleft())
            request_id = running.pop(rng.randrange(len(running)))
            begin = time.thread_time()
            state = apply(
                config, state, (RequestStarted(request_id), RequestEnded(request_id))
            ).state
            events.append(1e6 * (time.thread_time() - begin))
        elif len(waiting) > WAITING:
            running.append(waiting.popleft())
            state = apply(config, state, (RequestStarted(running[-1]),)).state
    medians = [
        percentiles(took[start : start + DECISIONS_PER_MEDIAN])["p50"]
        for start in range(0, count, DECISIONS_PER_MEDIAN)
    ]
    return {
        "decision_us": percentiles(took),
        "decision_us_medians": {"low": min(medians), "high": max(medians)},
        "start_and_end_us": percentiles(events),
    }


def decisions(count: int) -> dict[str, Any]:
    figures: dict[str, Any]
    all_keys, rng = documents(), random.Random(0)
    gc.freeze()
    config = RouterConfig(routing_policy_named("prefix"), BLOCK)
    with paused_collector():
        full, figures = filled(config, all_keys, rng)
    figures["policies"] = {}
    for name in ROUTING_POLICIES:
        config = RouterConfig(routing_policy_named(name), BLOCK)
        state = evolve(full, policy=config.policy.start())
        with paused_collector():
            figures["policies"][name] = decided(config, state, all_keys, count)
        show({name: figures["policies"][name]})
    begin = time.thread_time()
    state = apply(config, full, (ReplicaLeft(names(1)[0]),)).state
    figures["replica_left_us"] = 1e6 * (time.thread_time() - begin)
    took = []
    for _ in range(SHARDS // 2):  # two events each
        keys = (rng.randbytes(32),)
        events = (BlocksPublished(names(2)[1], keys), BlocksEvicted(names(2)[1], keys))
        begin = time.thread_time()
        state = apply(config, state, events).state
        took.append(1e6 * (time.thread_time() - begin) / 2)
    figures["event_while_swept_us"] = percentiles(took)
    show(figures)
    return figures


# --- traces -----------------------------------------------------------------------------


def served(trace: ArrivalTrace, load: Load, name: str) -> dict[str, Any]:
    """Simulate the trace under a policy."""
    begin = time.perf_counter()
    simulation = ReplicaSimulation(
        ENGINE,
        RouterConfig(policy_of(name), BLOCK),
        names(load.replicas),
        H200,
        trace.arrivals(BLOCK, load.speed),
        report_every=0.25,
    )
    with paused_collector():
        reports = reported(simulation, ENGINE, names(load.replicas))
    return {
        "policy": name,
        "replicas": load.replicas,
        "speed": load.speed,
        **summed(reports),
        "simulated_in": time.perf_counter() - begin,
    }


def reported(
    simulation: ReplicaSimulation, config: EngineConfig, replicas: Sequence[str]
) -> list[Report]:
    """Run a simulation; returns a report of each replica, in the order of their names."""
    reports = {name: Report(config) for name in replicas}
    for event in simulation.run():
        if not isinstance(event, RoutedArrival):
            reports[event.replica].fold(event.turn)
        elif event.routed.replica is not None:
            reports[event.routed.replica].note_arrival(event.request.id, event.time)
    return [*reports.values()]


def summed(reports: list[Report]) -> dict[str, Any]:
    """The figures of all replicas together."""
    figures = [report.figures() for report in reports]
    spreads = {}
    for name in ("ttft", "tpot", "e2e"):
        histogram = DurationHistogram()
        for report in reports:
            histogram.update(report.spreads[name])
        spreads[name] = {f"p{q}": histogram.quantile(q / 100) for q in (50, 90, 99)}

    def total(name: str) -> Any:
        return sum(replica_figures[name] for replica_figures in figures)

    seconds = max(replica_figures["seconds"] for replica_figures in figures)
    return {
        "requests": total("samples"),
        "hit_share": total("cached_tokens") / total("prompt_tokens"),
        **spreads,
        "seconds": seconds,
        "tokens_per_second": total("output_tokens") / seconds,
        "requests_of_a_replica": sorted(
            replica_figures["samples"] for replica_figures in figures
        ),
        "turns": total("turns"),
    }


def traces(path: Path, requests: int) -> list[dict[str, Any]]:
    trace, results = read_trace(str(path), requests), list[dict[str, Any]]()
    for load in LOADS:
        for name in ROUTING_POLICIES:
            results.append(served(trace, load, name))
            show(results[-1])
    return results


# --- tenants ----------------------------------------------------------------------------


def tenants(path: Path) -> list[dict[str, Any]]:
    trace, results = read_trace(str(path), TENANT_REQUESTS), list[dict[str, Any]]()
    policies = {
        "prefix": Prefix(),
        "prefix, without fair shares": Prefix(least=2**60),
        "least_loaded": LeastLoaded(),
    }
    for name, policy in policies.items():
        results.append({"policy": name, **waited(trace, policy)})
        show(results[-1])
    return results


def waited(trace: ArrivalTrace, policy: Any) -> dict[str, Any]:
    """Seconds to the first token by tenant, and until the last request has started."""
    arrivals = [*trace.arrivals(BLOCK, 8.0, mix=1)]
    arrived = {
        event.id: (moment, event)
        for moment, event in arrivals
        if isinstance(event, Request)
    }
    simulation = ReplicaSimulation(
        ENGINE, RouterConfig(policy, BLOCK), names(4), H200, arrivals, report_every=0.25
    )
    spent, last = dict[str, list[float]](), 0.0
    with paused_collector():
        for name, time_ in first_tokens(simulation):
            moment, request = arrived.pop(name)
            spent.setdefault(request.client, []).append(time_ - moment)
            last = time_
    assert not arrived, "all are served"
    return {
        "tenants": {
            tenant: {"requests": len(waits), **percentiles(waits)}
            for tenant, waits in sorted(spent.items())
        },
        "seconds": last,
    }


def first_tokens(simulation: ReplicaSimulation) -> Iterator[tuple[str, float]]:
    """The requests of a simulation, each with the time of its first token."""
    seen = set[str]()
    for event in simulation.run():
        if isinstance(event, RoutedArrival):
            continue
        for command in event.turn.transition.commands:
            if isinstance(command, Emit):
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    if tokens and name not in seen:
                        seen.add(name)
                        yield name, event.turn.transition.state.time


def earlier(args: argparse.Namespace) -> dict[str, Any]:
    """The parts of an earlier result."""
    path = args.folder / f"{args.name}.json"
    kinds = ("decisions", "traces", "tenants")
    if not path.exists():
        return {}
    results = json.loads(path.read_text("utf-8"))["results"]
    return {kind: results[kind] for kind in kinds if kind in results}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = earlier(args)
    if args.part in ("all", "decisions"):
        results["decisions"] = {
            "replicas": REPLICAS,
            "keys": KEYS,
            **decisions(args.decisions),
        }
    if args.part in ("all", "traces"):
        results["traces"] = traces(args.trace, args.requests)
    if args.part in ("all", "tenants"):
        results["tenants"] = tenants(args.trace)
    return results


if __name__ == "__main__":
    run(
        "routing",
        measure,
        {
            "--trace": TRACE,
            "--requests": {"type": int, "default": 4000, "help": "of the trace"},
            "--decisions": {
                "type": int,
                "default": 5000,
                "help": "timed for each policy",
            },
            "--part": {
                "choices": ("all", "decisions", "traces", "tenants"),
                "default": "all",
            },
        },
    )
