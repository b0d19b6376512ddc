"""Processes of `minfer serve` that are killed or stopped under load, as clients see it.

The bundled model in float32 on the CPU; clients that stream, each one request after the
other. Every answer has to be what the same request got while nothing happened. What is
killed (SIGKILL), or stopped without an end (SIGSTOP) and found by its heartbeat:

    engine, engine_stop     the engine of a server with two API servers
    replica                 one of two engines
    rank, rank_stop         one of two ranks of an engine (tensor parallel)
    front, front_stop       one of two API servers: its clients send requests again
    backend                 one of two servers behind `minfer route`: likewise

Parts that the result file has are not measured again: a run that was ended goes on.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import httpx
from attrs import define, field

from bench.results import circumstances, run, show, write
from bench.retried_load import RETRIES, RetriedLoad
from tests.effects.serving.process_deaths import (
    API_SERVERS,
    ENGINE,
    SOON,
    ClientAnswer,
    Load,
    Server,
    bodies,
    processes,
    server,
)

# Kinds of deaths, and options of the server for each.
KINDS: Final = {
    "engine": (),
    "engine_stop": ("--engine-timeout=5",),
    "replica": ("--replicas=2",),
    "rank": ("--tensor-parallel-size=2",),
    "rank_stop": ("--tensor-parallel-size=2",),
    "front": (),
    "front_stop": (),
    "backend": (),
}
RETRIED: Final = ("front", "front_stop", "backend")  # kinds whose clients send again
ENGINE_OPTIONS: Final = ("--dtype=float32", "--num-gpu-blocks-override=256")


@define(eq=False)
class Trial:
    """A server, its load, and what is killed."""

    server: Server
    load: RetriedLoad
    rng: Random
    backends: list["Backend"] = field(factory=list)
    seconds: list[float] = field(factory=list)  # from a kill until tokens flow again

    async def run(self, kind: str, kills: int, clients: int, pause: float) -> None:
        """Put load on the server, and kill again and again."""
        await self.server.until_ready()
        async with self.load.clients(clients):
            for _ in range(kills):
                await self.load.flows(time.monotonic())
                await asyncio.sleep(self.rng.uniform(0, pause))
                began = time.monotonic()
                await self.kill(kind)
                await self.load.flows(time.monotonic())
                self.seconds.append(time.monotonic() - began)

    async def kill(self, kind: str) -> None:
        """Kill a process of a kind, and wait for its successor."""
        sent_signal = signal.SIGSTOP if kind.endswith("_stop") else signal.SIGKILL
        match kind.removesuffix("_stop"):
            case "rank":
                await self.server.lose(self.rng.randrange(2), sent_signal)
            case "replica":
                name = f"{ENGINE} {self.rng.randrange(2)}"
                await self.server.successor(name, self.server.kill(name))
            case "front":
                name = self.rng.choice(API_SERVERS)
                await self.server.successor(name, self.server.kill(name, sent_signal))
                await self.server.until_ready()
            case "backend":
                await asyncio.to_thread(self.rng.choice(self.backends).restart)
            case _:
                await self.server.successor(ENGINE, self.server.kill(ENGINE, sent_signal))

    def figures(self) -> dict[str, Any]:
        load = self.load
        return {
            "kills": len(self.seconds),
            "requests": len(load.ended),
            "lost": len(load.lost()),
            "different": len(load.different()),
            "flawed": len(load.flawed()),
            "sent_again_by_clients": load.retried,
            "longest_pause_seconds": load.longest,
            "seconds_until_tokens_flow": {
                "median": median(self.seconds),
                "max": max(self.seconds),
            },
            "load_average_at_the_end": os.getloadavg()[0],  # of the whole machine
        }


@define(eq=False)
class Backend:
    """A server behind the router, with a port that its successors have too."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        command = [sys.executable, "-m", "minfer", "serve", f"--port={self.port}"]
        self.process = subprocess.Popen(
            [*command, "--api-processes=1", *ENGINE_OPTIONS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{self.url} is not ready after {SOON:.0f} s")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill all of its processes."""
        assert self.process is not None
        parent = self.process.pid
        children = [i for i, process in processes().items() if process.parent == parent]
        for process_id in (parent, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextlib.contextmanager
def routed() -> Iterator[tuple[Server, list[Backend]]]:
    """`minfer route` before two servers."""
    backends = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            backends.append(Backend(free.getsockname()[1]))
    command = [sys.executable, "-m", "minfer", "route", "--port=0"]
    command += [f"--backend={backend.url}" for backend in backends]
    try:
        for backend in backends:
            backend.start()
        with subprocess.Popen(
            [*command, "--routing=round_robin"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1].removesuffix("/v1")
            try:
                yield Server(process, url), backends
            finally:
                process.kill()
    finally:
        for backend in backends:
            if backend.process:
                backend.kill()


@contextlib.contextmanager
def started(kind: str) -> Iterator[tuple[Server, list[Backend]]]:
    """The server of a kind, with its backends."""
    if kind == "backend":
        with routed() as server_and_backends:
            yield server_and_backends
        return
    with server(*ENGINE_OPTIONS, *KINDS[kind]) as running:
        running.drain()
        yield running, []


def expected(requests: list[dict[str, Any]]) -> list[ClientAnswer]:
    """What an engine answers while nothing happens."""
    with server(*ENGINE_OPTIONS) as undisturbed:
        undisturbed.drain()
        load = Load(undisturbed.url, requests)
        asyncio.run(load.learn())
    return load.right


def measure(args: argparse.Namespace) -> dict[str, Any]:
    path: Path = args.folder / f"{args.name}.json"
    results: dict[str, Any] = {}
    if path.exists():
        results = json.loads(path.read_text("utf-8"))["results"]
    requests = bodies(1, args.tokens)
    right: list[ClientAnswer] = []
    for kind in args.kinds.split(","):
        if results.get(kind, {}).get("kills", 0) >= args.kills:
            continue
        right = right or expected(requests)
        with started(kind) as (running, backends):
            load = RetriedLoad(running.url, requests, right=right, rest=args.rest)
            load.tries = RETRIES if kind in RETRIED else 1
            trial = Trial(running, load, Random(f"{args.seed} {kind}"), backends)
            asyncio.run(trial.run(kind, args.kills, args.clients, args.pause))
        for error in load.lost():
            print("lost:", error)
        for body, answer in load.different():
            print("different:", body, answer.text)
        now = circumstances(args.seed)
        results[kind] = {
            **trial.figures(),
            "clients": args.clients,
            "date": now["date"],
            "commit": now["commit"],
        }
        show({"kind": kind, **trial.figures()})
        write(args.name, results, args.seed, args.folder)
    return results


if __name__ == "__main__":
    run(
        "server_deaths",
        measure,
        {
            "--kinds": ",".join(KINDS),
            "--kills": 30,
            "--clients": 6,
            "--tokens": 100,
            "--pause": {"type": float, "default": 0.5, "help": "seconds before a kill"},
            "--rest": {
                "type": float,
                "default": 0.1,
                "help": "seconds between a client's requests",
            },
            "--seed": 0,
        },
    )
