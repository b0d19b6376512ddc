"""Engines that are killed under load, as the clients of `minfer serve` see it.

Two API servers over one engine, with the bundled model; clients that stream, each one
request after the other: greedy and seeded ones, several samples, stop strings,
log-probabilities. The engine is killed (SIGKILL) at random moments while streams run.
Every answer is compared with what the same request got before the first kill.

In bfloat16 numbers are so coarse that who else is in a batch decides between tokens that
are nearly as likely, so answers need not be equal. There all requests ask for
log-probabilities too, and an answer is right if it has exactly as many tokens as it
should, none lost and none twice, and if its text is theirs, one after the other.

With `--ranks` the engine is a model that is divided over several processes, and each kill
is of one of these, drawn at random.
"""

import argparse
import asyncio
import os
import time
from collections import Counter
from random import Random
from statistics import median
from typing import Any

import numpy
from attrs import define, field

from bench.results import run, show
from tests.effects.serving.process_deaths import (
    ClientAnswer,
    Load,
    Server,
    bodies,
    server,
)


@define(eq=False)
class Death:
    """An engine that was killed, and the streams that it had."""

    rank: int
    time: float
    streams: list[ClientAnswer]
    born: float = 0.0  # when the next one's process was there
    flows: float = 0.0  # when some stream went on

    def pauses(self) -> list[float]:
        """For each stream that went on: seconds from the kill to its next event."""
        seconds = []
        for stream in self.streams:
            after = [moment for moment in stream.times if moment > self.born]
            if after:
                seconds.append(after[0] - self.time)
        return seconds


@define(eq=False)
class Trial:
    """A server, its load, and the deaths of its engines."""

    server: Server
    load: Load
    exact: bool  # answers must be equal
    deaths: list[Death] = field(factory=list)

    async def run(self, args: argparse.Namespace) -> None:
        """Put load on the server, and kill its engines."""
        rng = Random(args.seed)
        await self.server.until_ready()
        await self.load.learn()
        async with self.load.clients(args.clients):
            await self.load.flows(time.monotonic())
            for number in range(args.kills):
                await asyncio.sleep(rng.uniform(0, args.pause))
                rank = rng.randrange(args.ranks)
                death = Death(rank, time.monotonic(), list(self.load.live))
                await self.server.lose(rank)
                death.born = time.monotonic()
                self.deaths.append(death)
                await self.load.flows(death.born)
                death.flows = time.monotonic()
                if number % 10 == 9:
                    show({"kills": number + 1, **self.figures()})

    def figures(self) -> dict[str, Any]:
        pauses = [pause for death in self.deaths for pause in death.pauses()]
        hit = {
            id(stream)
            for death in self.deaths
            for stream in death.streams
            if stream.times
        }
        completed = {id(stream) for _, stream in self.load.ended if stream.done}
        high = float(numpy.percentile(pauses, 99)) if pauses else 0.0
        gaps = [death.flows - death.time for death in self.deaths]
        ranks = Counter(death.rank for death in self.deaths)
        return {
            "kills_by_rank": [ranks[rank] for rank in sorted(ranks)],
            "requests": len(self.load.ended),
            "lost": len(self.load.lost()),
            **({"different": len(self.load.different())} if self.exact else {}),
            "flawed": len(self.load.flawed()),
            "resumed_requests": len(hit & completed),
            "resumed_streams": len(pauses),
            "seconds_to_next_token": {
                "p50": median(pauses) if pauses else 0.0,
                "p99": high,
                "max": max(pauses, default=0.0),
            },
            "seconds_until_tokens_flow": {
                "p50": median(gaps),
                "p90": float(numpy.percentile(gaps, 90)),
                "max": max(gaps),
            },
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    exact = args.dtype == "float32"
    requests = bodies(4, args.tokens)
    if not exact:
        requests = [{"logprobs": 0, **body} for body in requests]
    options = [f"--dtype={args.dtype}", f"--device={args.device}"]
    options.append(f"--tensor-parallel-size={args.ranks}")
    with server(*options, "--num-gpu-blocks-override=256") as served:
        served.drain()
        trial = Trial(served, Load(served.url, requests), exact)
        asyncio.run(trial.run(args))
        for reason in trial.load.lost():
            print("lost:", reason)
        for body, stream in trial.load.different() if exact else ():
            print("different:", body, stream.text)
        for body, reason in trial.load.flawed():
            print("flawed:", body, reason)
    return {
        "dtype": args.dtype,
        "device": args.device,
        "ranks": args.ranks,
        "kills": args.kills,
        "longest_pause": args.pause,
        "clients": args.clients,
        **trial.figures(),
        "load_average_at_the_end": os.getloadavg()[0],  # of the whole machine
    }


if __name__ == "__main__":
    pause = "seconds at most from when streams go on to the next kill"
    tokens = {"type": int, "default": 300, "help": "of each sample, at most"}
    run(
        "engine_deaths",
        measure,
        {
            "--ranks": 1,
            "--kills": 100,
            "--pause": {"type": float, "default": 1.0, "help": pause},
            "--clients": 8,
            "--tokens": tokens,
            "--seed": 0,
            "--dtype": {"default": "float32", "choices": ["float32", "bfloat16"]},
            "--device": {"default": "cpu", "choices": ["cpu", "cuda"]},
        },
    )
