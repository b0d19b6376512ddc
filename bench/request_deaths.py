"""Requests that crash the engine that serves them, as `minfer serve` and its clients see
it.

A server of two API server processes whose engine dies of marked prompts, with the bundled
model, with one replica and with two; clients that stream, each one request after the
other. Each kind of such a request is sent once, each by another user: it dies at its
prefill, at a position of its output, some tokens after each start of an engine, with
several samples; by SIGSEGV, by an exception, by the kernel for want of memory, or by a
SIGKILL of which nothing shows that it did not come from outside: such a request is ended
after `dying_engine.KILLS` engines that served it alone, here.
Of each kind: engines that died in all, and while they served others; whether no replica
was ready at some time, and for how long; whether the request is refused when it is sent
again; and what the other clients lost.
"""

import argparse
import asyncio
import os
import re
import time
from threading import Thread
from typing import Any

import httpx
from attrs import define, field

from bench.results import run, show
from tests.effects.serving.dying_engine import DIES
from tests.effects.serving.process_deaths import SOON, Load, Server, bodies, server
from tests.effects.serving.test_process_deaths import CRASHING_REQUESTS, LIMITED

POLL_SECONDS = 0.01  # seconds from one look at /ready to the next
READY_POLLS = 8  # looks in a row, each at any API server process, that find all ready
RETRIES = 6  # times that the same request is sent again
DIED = re.compile(rf"{DIES} (\d+) other rows")
COMPLETIONS = "completions"


@define(eq=False)
class Trial:
    """A server with this number of replicas, and the lines of its standard error."""

    server: Server
    load: Load
    lines: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.server.process.stderr is not None
        for line in self.server.process.stderr:
            self.lines.append(line)

    async def run(self) -> dict[str, Any]:
        """Send a request of each kind, while clients stream."""
        results = {}
        await self.server.until_ready()
        await self.load.learn()
        async with self.load.clients():
            for kind, (path, body, _) in CRASHING_REQUESTS.items():
                await self.load.flows(time.monotonic())
                results[kind] = await self.kill(kind, path, body)
                show({"kind": kind, **results[kind]})
        return results

    async def kill(self, kind: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and watch the server until all its replicas are ready again."""
        url, before = f"{self.server.url}/v1/{path}", len(self.lines)
        extra = LIMITED if path == COMPLETIONS else {}
        body = {**body, **extra, "user": kind}
        head = {"connection": "close"}  # at any of the API server processes
        async with httpx.AsyncClient(timeout=SOON, headers=head) as client:
            started = time.monotonic()
            asking = asyncio.create_task(client.post(url, json=body))
            seconds = await self.unready(client, asking)
            ended = time.monotonic() - started
            answer = await asking
            retries = [(await client.post(url, json=body)).json() for _ in range(RETRIES)]
        deaths = DIED.findall("".join(self.lines[before:]))
        return {
            "status": answer.status_code,
            "code": answer.json()["error"]["code"],
            "engines": len(deaths),
            "engines_beside_others": sum(int(num_others) > 0 for num_others in deaths),
            "all_replicas_at_once": seconds > 0,
            "seconds_without_service": seconds,
            "seconds_until_it_failed": ended,
            "refused_again": sum(retry.get("error") is not None for retry in retries),
        }

    async def unready(self, client: httpx.AsyncClient, asking: Any) -> float:
        """Seconds for which no replica was ready, until the request has failed and all
        are ready, as all API server processes say.
        """
        total, last, well = 0.0, time.monotonic(), 0
        while well < READY_POLLS:
            health = await client.get(f"{self.server.url}/health")
            ready = await client.get(f"{self.server.url}/ready")
            now = time.monotonic()
            total += (now - last) * (ready.status_code != 200)
            last = now
            up, _, num_replicas = health.json().get("ready", "1 of 1").split()[:3]
            all_ready = ready.status_code == 200 and up == num_replicas
            well = well + 1 if asking.done() and all_ready else 0
            await asyncio.sleep(POLL_SECONDS)
        return total


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for replicas in args.replicas:
        options = ["--dtype=float32", f"--replicas={replicas}"]
        options.append("--num-gpu-blocks-override=128")
        with server(*options, module="tests.effects.serving.dying_engine") as served:
            trial = Trial(served, Load(served.url, bodies(1, args.tokens)))
            kinds = asyncio.run(trial.run())
        for error in trial.load.lost():
            print("lost:", error)
        results[f"{replicas} replicas"] = {
            "kinds": kinds,
            "requests_of_others": len(trial.load.ended),
            "lost": len(trial.load.lost()),
            "different": len(trial.load.different()),
        }
    return {**results, "load_average_at_the_end": os.getloadavg()[0]}


if __name__ == "__main__":
    run(
        "request_deaths",
        measure,
        {
            "--replicas": {"type": int, "nargs": "+", "default": [1, 2]},
            "--tokens": 150,
        },
    )
