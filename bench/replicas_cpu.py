"""Replicas of the bundled model on the CPU under sessions of several turns: what routing
by prefixes is worth beside round robin, and whether the simulator says so, too.

`minfer serve --replicas 3` has KV caches in which all sessions fit once, but not in each
of them. Each session sends its turns one after the other; a prompt is the one before and
some more. `served` are shares of prompt tokens that were cached, and times to first
tokens as clients see them. `simulated` takes the requests as router and engines recorded
them, in their order, at their times and with their lengths, through
`minfer.runs.simulate_replicas`, with costs of steps that are fitted to the same run.
There is one front, and so one router, as there.
"""

import argparse
import asyncio
import math
import random
import re
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import httpx
from attrs import frozen

from bench.results import percentiles, run, show
from bench.routing import reported, summed
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.runs.costs import MeasuredStep, fit, measured_steps
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.routing.messages import RoutingRequest
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig
from minfer.runs.cost import CostModel
from minfer.runs.routing_journal import RoutingJournal
from minfer.runs.simulate_replicas import ReplicaSimulation
from tests.effects.serving.process_deaths import SOON, Server, events, server

POLICIES: Final = ("prefix", "round_robin")
BLOCK: Final = 16  # tokens
FIRST: Final = (200, 400)  # tokens of a session's first prompt
MORE: Final = (40, 120)  # tokens that each turn adds
OUTPUT: Final = 24  # tokens
THOUGHT: Final = 0.5  # seconds between two turns, on average
TOKENS: Final = range(100, 2000)  # ids that prompts are made of


@frozen
class Run:
    """What the engines of a server recorded."""

    config: EngineConfig
    arrivals: list[tuple[float, Request]]
    lengths: dict[SampleId, int]
    cost: CostModel


def prompts(number: int, turns: int, seed: int) -> list[list[int]]:
    """The prompts of a session."""
    rng = random.Random(f"{seed} {number}")
    sizes = [rng.randint(*FIRST), *(rng.randint(*MORE) for _ in range(turns - 1))]
    parts = [rng.choices(TOKENS, k=size) for size in sizes]
    return [*accumulate(parts, lambda before, more: before + more)]


async def session(url: str, number: int, args: argparse.Namespace) -> list[float]:
    """Send the turns of a session; returns the seconds to each first token."""
    rng = random.Random(number)
    found = []
    async with httpx.AsyncClient(timeout=SOON) as client:
        for prompt in prompts(number, args.turns, args.seed):
            await asyncio.sleep(rng.expovariate(1 / THOUGHT))
            body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
            begin, first = time.monotonic(), None
            more = {"ignore_eos": True, "stream": True}
            async for event in events(client, url, {**body, **more}):
                assert event is None or "error" not in event, event
                first = first or time.monotonic() - begin
            assert first is not None
            found.append(first)
    return found


async def sessions(served: Server, args: argparse.Namespace) -> list[float]:
    await served.until_ready()
    each = (session(served.url, number, args) for number in range(args.sessions))
    return [one for found in await asyncio.gather(*each) for one in found]


def counted(served: Server, name: str) -> float:
    """A counter of /metrics, over all its labels."""
    text = served.get("/metrics").text
    found = re.findall(rf"^minfer_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def serve(policy: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve all sessions under a policy; the engines record in `folder`."""
    options = [f"--replicas={args.replicas}", f"--routing={policy}", "--device=cpu"]
    options += [
        "--api-processes=1",
        f"--block-size={BLOCK}",
        f"--num-gpu-blocks-override={args.blocks}",
    ]
    with server(*options, f"--journal={folder}") as served:
        begin = time.monotonic()
        firsts = asyncio.run(sessions(served, args))
        took = time.monotonic() - begin
        time.sleep(1)  # until the last counts are reported
        hits = counted(served, "prefix_cache_hits")
        share = hits / counted(served, "prefix_cache_queries")
        served.process.terminate()
        served.process.wait(SOON)
    return {"hit_share": share, "ttft": percentiles(firsts), "seconds": took}


def routed(folder: Path) -> list[str]:
    """The requests in the order in which the router decided; raises where a replay of it
    decides otherwise.
    """
    (path,) = folder.glob("*.routing")
    turns = RoutingJournal(path.read_bytes()).turns()
    return [turn.taken.id for turn in turns if isinstance(turn.taken, RoutingRequest)]


def recorded(folder: Path) -> Run:
    """What was recorded, by all replicas together."""
    arrived, lengths = dict[str, tuple[float, Request]](), dict[SampleId, int]()
    steps, config = list[MeasuredStep](), None
    for path in sorted(folder.glob("replica-*")):
        journal = read_journal(path)
        turns = [*journal.turns()]
        config = journal.config
        steps += measured_steps(iter(turns))
        for turn in turns:
            now = turn.transition.state.time
            came = [one.request for one in turn.events if isinstance(one, Submit)]
            arrived |= {request.id: (now, request) for request in came}
            for command in turn.transition.commands:
                if isinstance(command, Emit):
                    ends = command.finished
                    lengths |= {(one.id, one.sample): one.length for one in ends}
    assert config is not None
    # An engine notes an arrival with its next turn: it came before all that were routed
    # later.
    arrivals, latest = list[tuple[float, Request]](), math.inf
    for name in reversed(dict.fromkeys(routed(folder))):
        at, request = arrived[name]
        latest = min(latest, at)
        arrivals.append((latest, request))
    since = [(at - latest, request) for at, request in reversed(arrivals)]
    return Run(config, since, lengths, fit(iter(steps), "fitted")[0])


def simulate(ran: Run, policy: str, replicas: int) -> dict[str, Any]:
    names = [f"{number}" for number in range(replicas)]
    simulation = ReplicaSimulation(
        ran.config,
        RouterConfig(routing_policy_named(policy), ran.config.block_size),
        tuple(names),
        ran.cost,
        ran.arrivals,
        ran.lengths,
        report_every=0.25,
    )
    found = summed(reported(simulation, ran.config, names))
    return {name: found[name] for name in ("hit_share", "ttft", "requests")}


def compared(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as name:
            served = serve(policy, args, Path(name))
            ran = recorded(Path(name))
        simulated = simulate(ran, policy, args.replicas)
        error = simulated["hit_share"] / served["hit_share"] - 1
        yield {
            "policy": policy,
            "served": served,
            "simulated": simulated,
            "hit_share_error": error,
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = []
    for one in compared(args):
        show(one)
        found.append(one)
    return {"replicas": args.replicas, "policies": found}


if __name__ == "__main__":
    run(
        "replicas_cpu",
        measure,
        {
            "--replicas": 3,
            "--sessions": 12,
            "--turns": 6,
            "--blocks": {"type": int, "default": 256, "help": "of a replica's KV cache"},
            "--seed": 0,
        },
    )
