"""Clients that stream completions from a server, and the latencies that they measure.

In a closed loop, each client sends one request after the other. In an open
loop, requests are sent when they are due, answered or not. A request that fails ends the
measurement.

With t0 when a request was sent, t1 when its first event came, tn when its last one came,
and T output tokens:

    TTFT = t1 - t0        TPOT = (tn - t1) / (T - 1)

and ITL is the time between two events. A server may send several tokens in one event; its
ITL is then above its TPOT.

One event loop of Python reads some ten thousand events a second; a server on a GPU writes
more. So clients run in several processes, which begin together and take the numbers of
requests from one counter: none is idle while another has requests left.
"""

import asyncio
import gc
import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any, Final

import aiohttp
import numpy
from attrs import frozen

MS: Final = 1000.0
FIRST_ID: Final = 16  # special tokens are below it, or at the vocabulary's end
IDLE_SECONDS: Final = 2.0  # of a connection that is reused: servers close theirs later
REQUEST_SECONDS: Final = 3600.0
OK: Final = 200
HEADERS: Final = {"Content-Type": "application/json"}

_shared: list[Any] = []  # of a process: the counter and the barrier


@frozen
class LoadPlan:
    """Requests and their pace. Prompts are random tokens: they share no prefix."""

    url: str  # of the server
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    count: int  # requests
    clients: int  # requests in flight, at most
    due: Sequence[float] = ()  # seconds; empty: when a client is free
    seed: str = "0"

    def body(self, number: int) -> bytes:
        """The body of a request."""
        rng = random.Random(f"{self.seed}/{number}")
        ids = range(FIRST_ID, self.vocab_size)
        body = {
            "prompt": rng.choices(ids, k=self.prompt_tokens),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


@frozen
class RequestTimes:
    """An answered request. Times are seconds since the load began."""

    sent: float
    events: Sequence[float]  # when each event with tokens came
    output_tokens: int

    @property
    def ttft(self) -> float:
        """Milliseconds to the first event."""
        return MS * (self.events[0] - self.sent)

    @property
    def tpot(self) -> float:
        """Milliseconds for each token after the first."""
        return MS * (self.events[-1] - self.events[0]) / max(1, self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Milliseconds between events."""
        return [MS * (after - before) for before, after in pairwise(self.events)]

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Whether it was as fast as all goals: milliseconds by latency."""
        return all(getattr(self, name) <= goal for name, goal in goals.items())


def due_times(count: int, rate: float, seed: int = 0) -> list[float]:
    """When two or more requests are due that arrive as a Poisson process, in seconds from
    the first; stretched so that the rate of all is exactly `rate`.
    """
    rng = random.Random(seed)
    gaps = (rng.expovariate(1) for _ in range(count - 1))
    times = [*itertools.accumulate(gaps, initial=0.0)]
    stretch = (count - 1) / rate / times[-1]
    return [time * stretch for time in times]


def put(plan: LoadPlan, processes: int = 1) -> list[RequestTimes]:
    """Put a load on its server, from as many processes; returns the requests in their
    order.
    """
    processes = min(processes, plan.clients)
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0), context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _begin, (shared,)) as pool:
        shares = [
            plan.clients // processes + (place < plan.clients % processes)
            for place in range(processes)
        ]
        futures = [pool.submit(_work, plan, share) for share in shares]
        results = [future.result() for future in futures]
    by_number = {number: times for result in results for number, times in result.items()}
    return [by_number[number] for number in range(plan.count)]


def figures_of(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Throughput and latencies."""
    seconds = max(request.events[-1] for request in requests)
    tokens = sum(request.output_tokens for request in requests)
    figures = {
        "duration": seconds,
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds,
    }
    latencies = {
        "ttft": [request.ttft for request in requests],
        "tpot": [request.tpot for request in requests],
        "itl": [gap for request in requests for gap in request.itl],
    }
    for name, values in latencies.items():
        if values:  # no gaps where all answers are single events
            middle, high = map(float, numpy.percentile(values, [50, 99]))
            figures |= {f"median_{name}_ms": middle, f"p99_{name}_ms": high}
    return figures


def _begin(shared: tuple[Any, ...]) -> None:
    """Keep what a process shares with the others; only a process that starts gets it."""
    _shared.extend(shared)


def _work(plan: LoadPlan, clients: int) -> dict[int, RequestTimes]:
    """Run clients of one process, when all processes are ready."""
    counter, barrier = _shared

    def take() -> int:
        with counter.get_lock():
            number: int = counter.value
            counter.value += 1
        return number

    bodies = [plan.body(number) for number in range(plan.count)]
    gc.freeze()  # garbage collections of present objects would delay measurements
    barrier.wait()
    return asyncio.run(send_all(plan, bodies, clients, take))


async def send_all(
    plan: LoadPlan, bodies: Sequence[bytes], clients: int, take: Callable[[], int]
) -> dict[int, RequestTimes]:
    """Run clients until all numbers of requests are taken; returns requests by number."""
    by_number = dict[int, RequestTimes]()
    begin = time.monotonic()

    async def client(http: aiohttp.ClientSession) -> None:
        while (number := take()) < plan.count:
            if plan.due:
                await asyncio.sleep(begin + plan.due[number] - time.monotonic())
            by_number[number] = await _ask(http, plan.url, bodies[number], begin)

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    timeout = aiohttp.ClientTimeout(REQUEST_SECONDS)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(clients):
            group.create_task(client(http))
    return by_number


async def _ask(
    http: aiohttp.ClientSession, url: str, body: bytes, begin: float
) -> RequestTimes:
    """Send one request and read its answer. Raises RuntimeError if it is not whole."""
    events, usage = list[float](), None
    sent = time.monotonic() - begin
    async with http.post(f"{url}/v1/completions", data=body, headers=HEADERS) as answer:
        if answer.status != OK:
            raise RuntimeError(f"HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"error in a stream: {event['error']}")
                usage = event["usage"] or usage
                if event["choices"]:
                    events.append(time.monotonic() - begin)
    if usage is None:
        raise RuntimeError(f"a stream ended without usage, after {len(events)} events")
    return RequestTimes(sent, events, usage["completion_tokens"])
