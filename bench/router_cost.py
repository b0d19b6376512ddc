"""What `minfer route` itself costs: requests/s, and the latency that it adds to a request
and to each chunk of a stream, against talking to the backend directly.

Four processes on the CPU: two backends that answer at once, a router in front of them,
and this one, which asks. A backend is as cheap as one can be (a few lines over a socket),
so that what is measured is the router. Requests go straight to a backend and through the
router by turns, so that a slow minute hits both.

`decisions`: the processor's time, in this process, of what the router does beside HTTP:
to read a body and make its keys, and to place a request, start and end it, with a journal
and without.

`requests`: a chat of some length, answered whole; one client at a time for latencies, and
many at once for requests/s, with the processor's time that the router takes for each.
`chunks`: a stream of as many chunks, each with the time at which its backend sent it; all
processes have one clock. The router has the policy `prefix` and writes a journal.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.results import percentiles, run, show, spread
from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.effects.proxy.backend_dispatcher import BackendDispatcher
from minfer.effects.proxy.prompt_keys import read_fields, text_keys
from minfer.routing.messages import RoutingRequest
from minfer.routing.policies import Prefix
from minfer.routing.state import RouterConfig

CHUNKS: Final = 200  # of a stream
GAP_SECONDS: Final = 0.002  # seconds between two chunks
TURN: Final = "What follows is a paragraph of a conversation, of common length. " * 8
TURNS: Final = (1, 16)  # messages of a prompt
DECISIONS_PER_RUN: Final = 300  # decisions that are timed together
STREAMS: Final = (1, 16)  # at once
_EVENT: Final = b"data: "
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_WHOLE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
    b'{"id": "x-abc"}'
)


# --- a backend --------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of a connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            lengths = [line for line in lines if line.startswith(b"content-length:")]
            size = int(lengths[0].split(b":")[1]) if lengths else 0
            body = await reader.readexactly(size)
            if b'"stream": true' in body:
                await stream(writer)
            else:
                writer.write(_WHOLE)
            await writer.drain()
    writer.close()


async def stream(writer: asyncio.StreamWriter) -> None:
    """Write chunks, each with the time."""
    writer.write(_HEAD)
    for _ in range(CHUNKS):
        await asyncio.sleep(GAP_SECONDS)
        text = f"data: {time.monotonic():.6f}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
    writer.write(b"0\r\n\r\n")


async def backend() -> None:
    """Serve at any free port, which is printed."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the client -------------------------------------------------------------------------


def body_of(number: int, turns: int, *, streams: bool) -> bytes:
    """A conversation of its own, of `turns` messages."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": next(roles), "content": f"{number} {turn} {TURN}"}
        for turn in range(turns)
    ]
    return json.dumps({"model": "m", "messages": messages, "stream": streams}).encode()


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """The seconds of a request that is answered whole."""
    begin = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", data=body) as response:
        await response.read()
        assert response.status == 200
    return time.perf_counter() - begin


async def read_stream(
    http: aiohttp.ClientSession, url: str, body: bytes
) -> tuple[list[float], int]:
    """For each event, the seconds since its backend sent it; and how many parts came."""
    delays, num_chunks = [], 0
    async with http.post(f"{url}/v1/chat/completions", data=body) as response:
        async for chunk in response.content.iter_any():
            now = time.monotonic()
            sent = [float(moment) for moment in chunk.split(_EVENT) if moment.strip()]
            delays += [now - moment for moment in sent]
            num_chunks += 1
    assert len(delays) == CHUNKS
    return delays, num_chunks


def decisions(args: argparse.Namespace, turns: int) -> dict[str, Any]:
    """What routing costs by itself, for a prompt that was seen before; the least of
    several times.
    """
    body = body_of(0, turns, streams=False)
    prompt = text_keys(read_fields(body), body)
    request = RoutingRequest("r", prompt.keys, prompt.tokens)

    def least(act: Callable[[], object]) -> float:
        times = []
        for _ in range(args.repeats):
            begin = time.process_time()
            for _ in range(DECISIONS_PER_RUN):
                act()
            times.append((time.process_time() - begin) / DECISIONS_PER_RUN)
        return min(times)

    def placing(folder: Path | None) -> float:
        config = RouterConfig(Prefix())
        journal = None if folder is None else RoutingJournalFile(folder, config, 2**30)
        dispatcher = BackendDispatcher(
            config, cache_blocks=2**14, max_waiting=0, journal=journal
        )
        dispatcher.join("a")
        dispatcher.join("b")

        def place() -> None:
            with contextlib.suppress(StopIteration):  # it waits for nothing
                dispatcher.place(request).send(None)
            dispatcher.start(request.id)
            dispatcher.end(request.id)

        async def timed() -> float:
            return least(place)

        return asyncio.run(timed())

    with tempfile.TemporaryDirectory() as folder:
        return {
            "turns": turns,
            "body_bytes": len(body),
            "keys_seconds": least(lambda: text_keys(read_fields(body), body)),
            "place_seconds": placing(None),
            "place_with_journal_seconds": placing(Path(folder)),
        }


def cpu_seconds(process: int) -> float:
    """The processor's time that a process has used."""
    words = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    ticks = int(words[11]) + int(words[12])
    return ticks / 100  # as Linux counts them


# --- what is measured -------------------------------------------------------------------


async def requests(
    urls: dict[str, str], router: int, args: argparse.Namespace, turns: int
) -> dict[str, Any]:
    """Latencies of one client, and requests/s of many."""
    numbers = itertools.count()
    latencies: dict[str, list[float]] = {name: [] for name in urls}
    rates: dict[str, list[float]] = {name: [] for name in urls}
    busy = list[float]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def several(url: str, count: int) -> None:
            for _ in range(count):
                await ask(http, url, body_of(next(numbers) % 50, turns, streams=False))

        for url in urls.values():
            await several(url, 100)
        for _ in range(args.repeats):
            for name, url in urls.items():
                for _ in range(args.requests):
                    body = body_of(next(numbers) % 50, turns, streams=False)
                    latencies[name].append(await ask(http, url, body))
                begin, used = time.perf_counter(), cpu_seconds(router)
                per_client = args.requests // args.clients + 1
                await asyncio.gather(
                    *(several(url, per_client) for _ in range(args.clients))
                )
                took = time.perf_counter() - begin
                rates[name].append(per_client * args.clients / took)
                if name == "router":
                    busy.append(
                        (cpu_seconds(router) - used) / (per_client * args.clients)
                    )
    size = len(body_of(0, turns, streams=False))
    return {
        "turns": turns,
        "body_bytes": size,
        "latency_seconds": {n: percentiles(values) for n, values in latencies.items()},
        "added_seconds": added(latencies),
        "requests_per_second": {name: spread(values) for name, values in rates.items()},
        "router_cpu_seconds_of_a_request": spread(busy),
    }


async def chunks(
    urls: dict[str, str], router: int, args: argparse.Namespace, streams: int
) -> dict[str, Any]:
    """Delays of the events of `streams` streams at once."""
    delays: dict[str, list[float]] = {name: [] for name in urls}
    chunk_counts = dict.fromkeys(urls, 0)
    busy = list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for repeat in range(args.repeats):
            for name, url in urls.items():
                used = cpu_seconds(router)
                bodies = [
                    body_of(repeat * streams + i, 1, streams=True) for i in range(streams)
                ]
                streamed = await asyncio.gather(
                    *(read_stream(http, url, body) for body in bodies)
                )
                for stream_delays, count in streamed:
                    delays[name] += stream_delays
                    chunk_counts[name] += count
                if name == "router":
                    busy.append((cpu_seconds(router) - used) / (streams * CHUNKS))
    return {
        "streams": streams,
        "delay_seconds": {name: percentiles(values) for name, values in delays.items()},
        "added_seconds": added(delays),
        "chunks_that_came_alone": {
            name: count / (streams * CHUNKS * args.repeats)
            for name, count in chunk_counts.items()
        },
        "router_cpu_seconds_of_a_chunk": spread(busy),
    }


def added(times: dict[str, list[float]]) -> dict[str, float]:
    """How much larger each percentile is through the router."""
    direct, router = (percentiles(times[name]) for name in ("direct", "router"))
    return {name: router[name] - direct[name] for name in direct}


@contextlib.contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the last word of its first line."""
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().split()[-1]
        finally:
            child.terminate()


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.backend:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(backend())
        return None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = ("bench.router_cost", "--backend")
        ports = [stack.enter_context(process(*command))[1] for _ in range(2)]
        servers = [f"http://127.0.0.1:{port}" for port in ports]
        router, url = stack.enter_context(
            process(
                "minfer",
                "route",
                "--port=0",
                f"--journal={folder}",
                *(f"--backend={server}" for server in servers),
            )
        )
        urls = {"direct": servers[0], "router": url.removesuffix("/v1")}
        results: dict[str, Any] = {"clients": args.clients, "requests": [], "chunks": []}
        results["decisions"] = [decisions(args, turns) for turns in (*TURNS, 160)]
        show({"decisions": results["decisions"]})
        for turns in TURNS:
            result = asyncio.run(requests(urls, router.pid, args, turns))
            results["requests"].append(result)
            show(result)
        for streams in STREAMS:
            result = asyncio.run(chunks(urls, router.pid, args, streams))
            results["chunks"].append(result)
            show(result)
    return results


if __name__ == "__main__":
    run(
        "router_cost",
        measure,
        {
            "--repeats": 5,
            "--requests": 400,
            "--clients": 16,
            "--backend": {"action": "store_true", "help": "be a backend"},
        },
    )
