"""What routing costs by the number of replicas, and what engines tell a router: what
breaks first as a server grows to 1,000 GPUs.

`replicas`: a million keys over some replicas, published in messages of the blocks of a
step; a quarter of the documents are shared by 16 replicas as far as their first blocks,
and eight of them by all. The processor's time of a decision, of a key that is published
or evicted, of a report of a load, and of reading such a message; bytes for each key.

`engines`: what each GPU of the layout "8 x TP 1" of `bench.layouts` has to say and to
answer at `--speed`: requests, tokens, messages, keys a second. `front`: the processor's
time of a streamed token, from `server_gpu_05B`. `limits` multiplies these for 1,000 GPUs.
Times of a busy machine are too long: `routing_decisions` has those of 16 replicas on an
idle one.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.layout_costs import GPUS, Layout
from bench.layout_runs import simulation
from bench.results import RESULTS, run, show
from bench.routing import BLOCK, KEYS, TRACE, decided, documents, names, resident
from minfer.effects.cluster.link.link_messages import CachedKeys
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.trace_files import read_trace
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    LoadReport,
    ReplicaJoined,
)
from minfer.routing.policies import routing_policy_named
from minfer.routing.replica_events import cache_changes
from minfer.routing.router import apply, initial_router
from minfer.routing.state import RouterConfig, RouterState
from minfer.simulation.replicas import RoutedArrival

BLOCKS_PER_STEP: Final = 32  # blocks of a step of 2,048 tokens
SHARED: Final = 16  # replicas that share a document
LARGE: Final = 1000  # GPUs
KEY: Final = 65  # bytes of a key itself
POLLS: Final = 10  # a second, of each actor by the keeper of a cluster
# Calls a second of one process to many actors, and nodes and actors of a cluster that it
# is tested with, as Ray publishes (ray-project/ray: release/perf_metrics/
# microbenchmark.json, 1_n_actor_calls_async; release/benchmarks/README.md).
RAY: Final = {"calls/s": 8038, "nodes": 250, "actors": 10_000}


def filled(
    config: RouterConfig, all_keys: list[Any], count: int
) -> tuple[RouterState, dict[str, float]]:
    """A router whose replicas have all documents, and what a key took."""
    rng, replicas = random.Random(0), names(count)
    joined = tuple(map(ReplicaJoined, replicas))
    state = apply(config, initial_router(config), joined).state
    begin, before = time.thread_time(), resident()
    for number, keys in enumerate(all_keys):
        for start in range(0, len(keys), BLOCKS_PER_STEP):
            event = BlocksPublished(
                replicas[number % count], keys[start : start + BLOCKS_PER_STEP]
            )
            state = apply(config, state, (event,)).state
    figures = {
        "publish_us": 1e6 * (time.thread_time() - begin) / KEYS,
        "bytes": (resident() - before) / KEYS,
    }
    for number, keys in enumerate(all_keys[::4]):
        homes = replicas if number < 8 else rng.sample(replicas, SHARED)
        shared = tuple(BlocksPublished(n, keys[: rng.randrange(20, 100)]) for n in homes)
        state = apply(config, state, shared).state
    return state, figures


def seconds_of(act: Callable[[], object], times: int) -> float:
    begin = time.thread_time()
    for _ in range(times):
        act()
    return (time.thread_time() - begin) / times


def of_replicas(count: int, decisions: int) -> dict[str, Any]:
    all_keys, config = documents(), RouterConfig(routing_policy_named("prefix"), BLOCK)
    gc.freeze()
    with paused_collector():
        state, figures = filled(config, all_keys, count)
        rng, replica = random.Random(2), names(count)[-1]
        turned = state
        keys = [
            tuple(rng.randbytes(32) for _ in range(BLOCKS_PER_STEP)) for _ in range(200)
        ]
        begin = time.thread_time()
        for batch in keys:
            turned = apply(config, turned, (BlocksPublished(replica, batch),)).state
        for batch in keys:
            turned = apply(config, turned, (BlocksEvicted(replica, batch),)).state
        took = (time.thread_time() - begin) / (2 * BLOCKS_PER_STEP * len(keys))
        report = LoadReport(replica, 1, 20, 2000, 1000)
        text = msgspec.msgpack.encode(CachedKeys(published=keys[0], evicted=keys[1]))
        reader = msgspec.msgpack.Decoder(CachedKeys)
        figures |= {
            "replicas": count,
            "publish_or_evict_us": 1e6 * took,
            "report_us": 1e6 * seconds_of(lambda: apply(config, state, (report,)), 2000),
            "read_us": 1e6
            * seconds_of(lambda: reader.decode(text), 2000)
            / (2 * BLOCKS_PER_STEP),
            "message_bytes_per_key": len(text) / (2 * BLOCKS_PER_STEP),
        }
        figures |= decided(config, state, all_keys, decisions)
    show(figures)
    return figures


def of_engines(path: Path, requests: int, speed: float) -> dict[str, Any]:
    """What the engines of a machine publish and evict, in its second half of requests:
    their pools are full then.
    """
    trace = read_trace(str(path), requests)
    simulated = simulation(Layout("", budget=4096), trace, speed, GPUS)
    begin = trace.rows[requests // 2].time / speed
    end = trace.rows[-1].time / speed
    sums = {"messages": 0, "published": 0, "evicted": 0, "turns": 0}
    with paused_collector():
        for event in simulated.run():
            if isinstance(event, RoutedArrival):
                continue
            turn = event.turn
            if not begin <= turn.transition.state.time <= end:
                continue
            changes = cache_changes(simulated.config, turn.before, turn.transition.state)
            sums["published"] += len(changes.published)
            sums["evicted"] += len(changes.evicted)
            sums["messages"] += bool(changes.published or changes.evicted)
            sums["turns"] += 1
    rates = {f"{name}/s": count / (end - begin) / GPUS for name, count in sums.items()}
    rows = trace.rows[requests // 2 :]
    figures = {
        "speed": speed,
        **rates,
        "requests/s": len(rows) / (end - begin) / GPUS,
        "tokens/s": sum(row.output for row in rows) / (end - begin) / GPUS,
        "blocks": simulated.config.num_blocks,
    }
    show(figures)
    return figures


def of_fronts() -> dict[str, float]:
    """The processor's time of a token that an API server streams: in steps of many of its
    requests, with 256 clients of four API servers; and singly, with one client.
    """
    text = (RESULTS / "server_gpu_05B.json").read_text("utf-8")
    clients = json.loads(text)["results"]["fronts 4"]["clients"]
    return {
        f"us_per_token_{name}": clients[count]["second"]["front_cpu_us_per_token"]
        for name, count in (("together", "256"), ("singly", "1"))
    }


def limits(
    replicas: list[dict[str, Any]], engine: dict[str, Any], front: dict[str, float]
) -> dict[str, Any]:
    """Of `LARGE` GPUs with a replica each. `full_at`: with as many GPUs it takes a whole
    core of each API server, or all that one API server can do.
    """
    largest = max(replicas, key=lambda result: result["replicas"])
    keys = engine["published/s"] + engine["evicted/s"]
    key = 1e-6 * (largest["publish_or_evict_us"] + largest["read_us"])
    reports = 4 * 1e-6 * largest["report_us"]  # four a second
    bytes_ = LARGE * engine["blocks"] * (largest["bytes"] + KEY)
    requests, tokens = LARGE * engine["requests/s"], LARGE * engine["tokens/s"]
    fronts = {name: 1e-6 * took * tokens for name, took in front.items()}
    links = LARGE * max(fronts.values())
    return {
        "keys_in_index": LARGE * engine["blocks"],
        "index_gb_of_each_front": bytes_ / 1e9,
        "key_events_per_second": LARGE * keys,
        "key_events_cores_of_each_front": LARGE * keys * key,
        "key_events_full_at": 1 / (keys * key),
        "reports_cores_of_each_front": LARGE * reports,
        "requests_per_second": requests,
        "decisions_cores_of_all_fronts": 1e-6 * requests * largest["decision_us"]["p50"],
        "tokens_per_second": tokens,
        "streams_cores_of_all_fronts": fronts,
        "front_full_at": {
            name: 1 / (1e-6 * took * engine["tokens/s"]) for name, took in front.items()
        },
        "links_at_most": links,
        "keeper_calls_per_second": LARGE * POLLS,
        "keeper_full_at": RAY["calls/s"] / POLLS,
        "ray_publishes": RAY,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    replicas = [of_replicas(count, args.decisions) for count in args.replicas]
    engine = of_engines(args.trace, args.requests, args.speed)
    front = of_fronts()
    return {
        "keys": KEYS,
        "replicas": replicas,
        "engine": engine,
        "front": front,
        "limits": limits(replicas, engine, front),
    }


if __name__ == "__main__":
    run(
        "router_scale",
        measure,
        {
            "--trace": TRACE,
            "--requests": {"type": int, "default": 2000, "help": "of the trace"},
            "--speed": {"type": float, "default": 4.5, "help": "of a machine's trace"},
            "--replicas": {"type": int, "nargs": "+", "default": [16, 125, 250, 1000]},
            "--decisions": {"type": int, "default": 1000, "help": "timed for each"},
        },
    )
