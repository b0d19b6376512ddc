"""Engines on a Ray cluster that lose processes, actors, nodes and more under load, as the
clients of `minfer serve --distributed ray` see it.

Clusters of `ray.cluster_utils` on this machine, with the bundled model on the CPU, and
nodes with room for an engine each; clients that stream, each one request after the other.
Every answer has to be what one engine without a cluster said in float32. What is killed:

    engine   an engine's process (SIGKILL)
    actor    its actor (`ray.kill`), which Ray restarts
    node     a node (SIGKILL of its processes); then another one joins
    leave    a node that is drained and then stopped; another one has joined before
    keeper   the process that keeps the engines (SIGKILL), and an engine at half the times
    front    an API server (SIGKILL), and so a router: its clients ask again

Parts that the result file has are not measured again: a run that was ended goes on.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import httpx
from attrs import define, field

from bench.results import circumstances, run, show, write
from bench.retried_load import RETRIES, RetriedLoad
from tests.effects.cluster.ray.ray_nodes import RayNodes, ray_nodes
from tests.effects.serving.process_deaths import (
    API_SERVERS,
    ENGINE,
    SOON,
    ClientAnswer,
    Load,
    Server,
    bodies,
    long_bodies,
    server,
)

KINDS: Final = ("engine", "actor", "node", "keeper", "front", "leave")
POLL_SECONDS: Final = 0.1  # seconds between two questions for the state
MAX_WAIT_SECONDS: Final = 300.0  # it takes a few, unless others use the machine
SERVER_OPTIONS: Final = ("--dtype=float32", "--num-gpu-blocks-override=128")


@define(eq=False)
class Trial:
    """A server on a cluster, its load, and what is killed."""

    nodes: RayNodes
    server: Server
    load: RetriedLoad
    replicas: int
    rng: Random
    apart: bool = False  # then routing by prefixes need not give a new engine any load
    client: httpx.AsyncClient = field(factory=lambda: httpx.AsyncClient(timeout=SOON))
    back: list[float] = field(factory=list)  # seconds until all were ready again
    # Seconds from a node's joining until its engine was ready, and had a request.
    joined: list[float] = field(factory=list)
    loaded: list[float] = field(factory=list)

    async def run(self, kind: str, kills: int, clients: int) -> None:
        """Put load on the server, and kill something again and again."""
        await self.server.until_ready()
        await self.until_ready(self.replicas)
        kill: Callable[[int], Awaitable[None]] = getattr(self, kind)
        async with self.load.clients(clients):
            for number in range(kills):
                await self.load.flows(time.monotonic())
                await asyncio.sleep(self.rng.uniform(0, 0.3))
                began = time.monotonic()
                await kill(number)
                self.back.append(time.monotonic() - began)
                await self.load.flows(time.monotonic())

    async def engine(self, number: int) -> None:
        """Kill an engine's process."""
        del number
        os.kill(self.rng.choice(self.nodes.engines()), signal.SIGKILL)
        await self.until_back()

    async def actor(self, number: int) -> None:
        """Kill an actor."""
        del number
        self.nodes.kill_actor(self.rng)
        await self.until_back()

    async def node(self, number: int) -> None:
        """Kill a node, and have another one join."""
        del number
        self.nodes.remove(self.rng.choice(self.nodes.others()))
        await self.until_ready(self.replicas - 1)
        await self.load.flows(time.monotonic())
        missing = await self.unready()
        await asyncio.to_thread(self.nodes.join)
        joined = time.monotonic()
        await self.until_ready(self.replicas)
        self.joined.append(time.monotonic() - joined)
        if self.apart:
            return
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not await self.runs(missing):
                pass
        self.loaded.append(time.monotonic() - joined)

    async def leave(self, number: int) -> None:
        """Have a node join, and another one leave as it should."""
        del number
        leaver = self.rng.choice(self.nodes.others())
        await asyncio.to_thread(self.nodes.join)
        await asyncio.to_thread(self.nodes.drain, leaver)
        await self.until_back()
        await asyncio.to_thread(self.nodes.remove, leaver, kill=False)

    async def keeper(self, number: int) -> None:
        """Kill the process that keeps the engines, half of the times with an engine."""
        before = self.server.kill(ENGINE)
        if number % 2:
            await self.engine(number)
        await self.server.successor(ENGINE, before)
        await asyncio.sleep(self.rng.uniform(0, 2.0))
        await self.until_ready(self.replicas)

    async def front(self, number: int) -> None:
        """Kill an API server."""
        del number
        ended, name = len(self.load.ended), self.rng.choice(API_SERVERS)
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while len(self.load.ended) == ended:  # or the same request is cut each time
                await asyncio.sleep(POLL_SECONDS)
        await self.server.successor(name, self.server.kill(name))
        await self.server.until_ready()

    async def until_back(self) -> None:
        """Wait until one of the engines is gone, and there again."""
        await self.until_ready(self.replicas - 1)
        await self.until_ready(self.replicas)

    async def until_ready(self, count: int) -> None:
        """Wait until `count` engines are ready."""
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while len(await self.unready()) != self.replicas - count:
                pass

    async def unready(self) -> set[str]:
        """The engines that are not ready, as an API server says."""
        return {
            engine["replica"]
            for engine in await self.health()
            if engine["status"] != "ready"
        }

    async def runs(self, which: set[str]) -> bool:
        """Whether these engines have requests."""
        running = {engine["replica"]: engine["running"] for engine in await self.health()}
        return all(running[name] for name in which)

    async def health(self) -> list[dict[str, Any]]:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                answer = await self.client.get(f"{self.server.url}/health")
                return list(answer.json()["replicas"])
            except httpx.HTTPError:  # that API server was killed
                continue

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        load = self.load
        return {
            "kills": len(self.back),
            "requests": len(load.ended),
            "lost": len(load.lost()),
            "different": len(load.different()),
            "flawed": len(load.flawed()),
            "asked_again_by_clients": load.retried,
            "longest_pause": load.longest,
            "seconds_until_all_are_ready": _seconds(self.back),
            **{
                f"seconds_from_joining_to_{event}": _seconds(seconds)
                for event, seconds in (("ready", self.joined), ("load", self.loaded))
                if seconds
            },
            "load_average_at_the_end": os.getloadavg()[0],  # of the whole machine
        }


def _seconds(seconds: list[float]) -> dict[str, float]:
    return {"median": median(seconds), "max": max(seconds)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = _earlier(args.folder / f"{args.name}.json")
    asked = (long_bodies if args.apart else bodies)(1, args.tokens)
    right: list[ClientAnswer] = []
    for count in map(int, args.nodes.split(",")):
        for kind in args.kinds.split(","):
            result = results.setdefault(f"{count} nodes", {})
            if result.get(kind, {}).get("kills", 0) >= args.kills:
                continue
            right = right or _right(asked)
            rng = Random(f"{args.seed} {count} {kind}")
            with (
                ray_nodes(count, hooks=False) as nodes,
                server(
                    "--distributed=ray", *SERVER_OPTIONS, *_engines(count, args)
                ) as served,
            ):
                served.drain()
                load = RetriedLoad(served.url, asked, right=right, rest=args.rest)
                load.tries = RETRIES if kind == "front" else 1
                trial = Trial(nodes, served, load, count, rng, args.apart)
                asyncio.run(trial.run(kind, args.kills, count + args.more))
                _report(trial)
                served.process.send_signal(signal.SIGINT)
                served.process.wait(SOON)
            now = circumstances(args.seed)
            provenance = {"date": now["date"], "commit": now["commit"]}
            result[kind] = {**trial.figures(), "clients": count + args.more, **provenance}
            show({"nodes": count, "kind": kind, **trial.figures()})
            write(args.name, results, args.seed, args.folder)
    print(table(results))
    return results


def _right(asked: list[dict[str, Any]]) -> list[ClientAnswer]:
    """What one engine says, without a cluster."""
    with server(*SERVER_OPTIONS) as single:
        single.drain()
        load = Load(single.url, asked)
        asyncio.run(load.learn())
    return load.right


def _engines(count: int, args: argparse.Namespace) -> list[str]:
    if args.apart:
        return [f"--prefill={count // 2}", f"--decode={count - count // 2}"]
    return [f"--replicas={count}", "--routing=round_robin"]


def _earlier(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return dict(json.loads(path.read_text("utf-8"))["results"])


def _report(trial: Trial) -> None:
    for reason in trial.load.lost():
        print("lost:", reason)
    for body, answer in trial.load.different():
        print("different:", body, answer.text)
    for body, reason in trial.load.flawed():
        print("flawed:", body, reason)


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The figures of all parts, a line each."""
    names = ("kills", "requests", "lost", "different", "asked_again_by_clients")
    titles = ("asked", "lost", "other", "again", "longest pause", "joined to load")
    lines = [
        f"{'':16}{'kills':>7}" + "".join(f"{title:>{len(title) + 2}}" for title in titles)
    ]
    for nodes, kinds in results.items():
        for kind, figures in kinds.items():
            counts = [figures[name] for name in names]
            loaded = figures.get("seconds_from_joining_to_load", {}).get("median")
            load_text = "" if loaded is None else f"{loaded:.1f} s"
            lines.append(
                f"{nodes + ' ' + kind:16}{counts[0]:>7}{counts[1]:>7}{counts[2]:>6}"
                f"{counts[3]:>6}{counts[4]:>7}{figures['longest_pause']:>13.1f} s"
                f"{load_text:>16}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    more = {"type": int, "default": 1, "help": "clients beyond one for each node"}
    rest = {"type": float, "default": 0.2, "help": "seconds between a client's requests"}
    apart = {"action": "store_true", "help": "half of the engines compute prompts"}
    run(
        "ray_deaths",
        measure,
        {
            "--nodes": "2,4",
            "--kinds": ",".join(KINDS),
            "--kills": 20,
            "--more": more,
            "--rest": rest,
            "--tokens": 100,
            "--apart": apart,
            "--seed": 0,
        },
    )
