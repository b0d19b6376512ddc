"""Sessions of several turns against a server with replicas: what routing by prefixes is
worth beside round robin, and whether the simulator predicts it.

`minfer serve --replicas 4`, of the bundled model on the CPU, or with `--shape 7B` of
random weights on as many GPUs; with `--distributed ray` Ray places the engines. Sessions
begin one after the other within `--ramp` seconds. A prompt is a system prompt that all
share, all earlier turns of its session, with made-up answers, and a new question; a
session thinks between an answer and its next turn. The KV caches hold all sessions
together, with some to spare, and none holds them all (`blocks`).

`served`: the share of prompt tokens that were cached, as usage says, and seconds to the
first tokens as the client sees them. `engines`: the same seconds as the engines recorded
them. `predicted`: the requests of the run at the times when the client sent them, through
`minfer.simulation.replicas`, with costs of steps that are fitted to the steps of both
runs. `error` is of the prediction beside `served`.

The server has one API server, and so one router, as in the simulator. Reports of loads
are as often as there. On fewer cores than replicas and client need, times are those of a
machine that is too small.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy
from attrs import frozen

from bench.results import run, show
from bench.routing import reported
from bench.server_clients import write_model
from bench.server_gpu import serving
from bench.shapes import qwen
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.runs.costs import MeasuredStep, fit, measured_steps
from minfer.effects.runs.report import DurationHistogram, Report
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig
from minfer.simulation.cost import CostModel
from minfer.simulation.replicas import ReplicaSimulation

POLICIES: Final = ("round_robin", "prefix")
BLOCK: Final = 16  # tokens
TOKENS: Final = range(100, 2000)  # ids that prompts are made of
SPARE: Final = 1.3  # blocks of all caches, of those that all sessions have in the end
LOAD: Final = (  # the options that say what was measured
    *("replicas", "distributed", "shape", "sessions", "turns", "system", "first"),
    *("more", "output", "think", "ramp", "blocks"),
)
AIMS: Final = {"hit_share": 1.5, "ttft_p50": 0.8, "error": 0.15}


@frozen
class Asked:
    """A request as its client saw it."""

    sent: float  # seconds since the run began
    ttft: float
    prompt: tuple[int, ...]
    cached: int  # tokens of it


@frozen
class Recorded:
    """What the engines of a server recorded."""

    config: EngineConfig
    requests: dict[tuple[int, ...], Request]  # by prompts, of which no two are equal
    lengths: dict[SampleId, int]
    steps: tuple[MeasuredStep, ...]
    ttft: tuple[float, ...]


# --- the load ---------------------------------------------------------------------------


def turns(number: int, args: argparse.Namespace) -> list[list[int]]:
    """The prompts of a session."""
    rng = random.Random(f"{args.seed} {number}")
    prompt = random.Random(args.seed).choices(TOKENS, k=args.system)
    prompts = list[list[int]]()
    for turn in range(rng.randint(*args.turns)):
        size = rng.randint(*(args.more if turn else args.first))
        prompt = prompt + rng.choices(TOKENS, k=size)
        prompts.append(prompt)
    return prompts


def blocks_of(args: argparse.Namespace) -> int:
    """Of a replica: its part of what all sessions have in the end, and some to spare."""
    last = (len(turns(number, args)[-1]) for number in range(args.sessions))
    total = sum(-(-(size - args.system + args.output) // BLOCK) for size in last)
    blocks: int = int(SPARE * total / args.replicas) + args.system // BLOCK
    return blocks


async def ask(
    http: aiohttp.ClientSession, url: str, prompt: list[int], output: int, since: float
) -> Asked:
    body = {
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, usage = time.monotonic(), None, None
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.monotonic() - sent
            usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
    assert first is not None
    assert usage is not None
    assert usage["prompt_tokens"] == len(prompt)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(sent - since, first, tuple(prompt), cached)


async def sessions(url: str, args: argparse.Namespace) -> list[Asked]:
    """Send all sessions; returns the requests in the order in which they were sent."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(600)
    ) as http:
        since = time.monotonic()

        async def session(number: int) -> list[Asked]:
            rng = random.Random(number)
            await asyncio.sleep(rng.uniform(0, args.ramp))
            requests = list[Asked]()
            for prompt in turns(number, args):
                if requests:
                    await asyncio.sleep(rng.expovariate(1 / args.think))
                requests.append(await ask(http, url, prompt, args.output, since))
            return requests

        by_session = await asyncio.gather(*map(session, range(args.sessions)))
    return sorted(
        (request for asked in by_session for request in asked),
        key=lambda request: request.sent,
    )


# --- what becomes of it -----------------------------------------------------------------


def options_of(policy: str, args: argparse.Namespace, folder: Path) -> list[str]:
    options = [
        f"--replicas={args.replicas}",
        f"--routing={policy}",
        "--api-processes=1",
        f"--block-size={BLOCK}",
        f"--num-gpu-blocks-override={args.blocks}",
        f"--journal={folder / 'journal'}",
        f"--device={'cuda' if args.shape else 'cpu'}",
    ]
    if args.distributed:
        options.append(f"--distributed={args.distributed}")
    if args.shape:
        (folder / "model").mkdir()
        write_model(folder / "model", qwen(args.shape))
        options += ["--model", str(folder / "model"), "--load-format", "dummy"]
    return options


async def until_ready(url: str, replicas: int) -> None:
    """Wait until all replicas are ready."""
    expected = f"{replicas} of {replicas} replicas"
    async with aiohttp.ClientSession() as http, asyncio.timeout(600):
        while True:
            async with http.get(f"{url}/ready") as answer:
                status = await answer.json()
            if answer.status == 200 and status["ready"] == expected:
                return
            await asyncio.sleep(0.5)


def served(policy: str, args: argparse.Namespace) -> tuple[list[Asked], Recorded]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(options_of(policy, args, folder)) as (url, _, _):
            asyncio.run(until_ready(url, args.replicas))
            if args.shape:
                time.sleep(25)  # idle engines capture graphs
            requests = asyncio.run(sessions(url, args))
        return requests, recorded(folder / "journal")


def recorded(folder: Path) -> Recorded:
    """What all replicas recorded."""
    requests, lengths = dict[tuple[int, ...], Request](), dict[SampleId, int]()
    steps, ttft, config = list[MeasuredStep](), list[float](), None
    for path in sorted(folder.glob("replica-*")):
        journal = read_journal(path)
        all_turns = [*journal.turns()]
        config, report = journal.config, Report(journal.config)
        steps += measured_steps(iter(all_turns))
        submitted = dict[str, float]()
        for turn in report.fold_turns(all_turns):
            now = turn.transition.state.time
            for event in turn.events:
                if isinstance(event, Submit):
                    requests[event.request.prompt] = event.request
                    submitted[event.request.id] = now
            for command in turn.transition.commands:
                if not isinstance(command, Emit):
                    continue
                lengths |= {
                    (finished.id, finished.sample): finished.length
                    for finished in command.finished
                }
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    if tokens and name in submitted:
                        ttft.append(now - submitted.pop(name))
    if config is None:
        raise RuntimeError(f"{folder} has no journal of a replica")
    return Recorded(config, requests, lengths, tuple(steps), tuple(ttft))


def predicted(
    policy: str, replicas: int, asked: list[Asked], ran: Recorded, cost: CostModel
) -> dict[str, Any]:
    """The figures of the simulator, for requests at the times when they were sent."""
    names = tuple(f"{number}" for number in range(replicas))
    simulation = ReplicaSimulation(
        ran.config,
        RouterConfig(routing_policy_named(policy), BLOCK),
        names,
        cost,
        [(request.sent, ran.requests[request.prompt]) for request in asked],
        ran.lengths,
        report_every=0.25,
    )
    reports = reported(simulation, ran.config, names)
    ttft = DurationHistogram()
    for report in reports:
        ttft.update(report.spreads["ttft"])
    prompts = sum(report.sums["prompt"] for report in reports)
    return {
        "hit_share": sum(report.sums["hit"] for report in reports) / prompts,
        "ttft": {"p50": ttft.quantile(0.5), "p90": ttft.quantile(0.9)},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    p50, p90 = numpy.percentile(values, [50, 90])
    return {"p50": float(p50), "p90": float(p90)}


def compared(
    runs: dict[str, tuple[list[Asked], Recorded]], replicas: int
) -> dict[str, Any]:
    """What was measured and predicted under each policy, and the ratios."""
    results = dict[str, Any]()
    cost, _ = fit([step for _, ran in runs.values() for step in ran.steps], "both runs")
    for policy, (asked, ran) in runs.items():
        simulated = predicted(policy, replicas, asked, ran, cost)
        prompts = sum(len(request.prompt) for request in asked)
        real: dict[str, Any] = {
            "hit_share": sum(request.cached for request in asked) / prompts,
            "ttft": spread([request.ttft for request in asked]),
        }
        results[policy] = {
            "requests": len(asked),
            "seconds": asked[-1].sent,
            "served": real,
            "engines": {"ttft": spread(ran.ttft)},
            "predicted": simulated,
            "error": {
                "hit_share": simulated["hit_share"] / real["hit_share"] - 1,
                "ttft_p50": simulated["ttft"]["p50"] / real["ttft"]["p50"] - 1,
            },
        }
    prefix, turn = results["prefix"], results["round_robin"]
    ratios = {
        side: {
            "hit_share": prefix[side]["hit_share"] / turn[side]["hit_share"],
            "ttft_p50": prefix[side]["ttft"]["p50"] / turn[side]["ttft"]["p50"],
        }
        for side in ("served", "predicted")
    }
    return {**results, "prefix_to_round_robin": ratios}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.blocks = args.blocks or blocks_of(args)
    runs = {policy: served(policy, args) for policy in POLICIES}
    results = compared(runs, args.replicas)
    show(results)
    load = {name: getattr(args, name) for name in LOAD}
    return {"load": load, "block_size": BLOCK, "aims": AIMS, **results}


def least_and_most(default: tuple[int, int], help_text: str) -> dict[str, Any]:
    return {"type": int, "nargs": 2, "default": [*default], "help": help_text}


if __name__ == "__main__":
    run(
        "routing_live",
        measure,
        {
            "--replicas": 4,
            "--distributed": {"choices": ("ray",), "help": "what places the engines"},
            "--shape": {"default": "", "help": "of random weights, on GPUs"},
            "--sessions": 200,
            "--turns": least_and_most((3, 5), "of a session, from and to"),
            "--system": {"type": int, "default": 128, "help": "tokens that all share"},
            "--first": least_and_most((200, 500), "tokens of a first question"),
            "--more": least_and_most((100, 250), "tokens that another turn adds"),
            "--output": {"type": int, "default": 24, "help": "tokens"},
            "--think": {"type": float, "default": 2.0, "help": "seconds, on average"},
            "--ramp": {"type": float, "default": 30.0, "help": "seconds"},
            "--blocks": {"type": int, "default": 0, "help": "of a replica's KV cache"},
            "--seed": 0,
        },
    )
