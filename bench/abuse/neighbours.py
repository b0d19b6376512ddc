"""Well-behaved clients: each streams one answer after the other, and notes the gaps.

They read from their sockets without an HTTP library, so that little of what they see is
their own doing. `python -m bench.abuse.neighbours PORT STREAMS` is one process of them:
for each line that it reads it prints what they saw since the last one.
"""

import asyncio
import json
import sys
import time
from typing import Any, Final

from attrs import define, field

from bench.abuse.attacks import HOST, request

TOKENS: Final = 512  # of an answer
RETRY_SECONDS: Final = 5.0  # seconds until a client whose connection broke tries again
END: Final = b"0\r\n\r\n"  # of an answer in chunks
PROBE_SECONDS: Final = 0.1  # seconds
HEALTH: Final = f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
PROBE: Final = {"prompt": [i % 999 for i in range(1600)], "max_tokens": 1}


@define
class Seen:
    """What clients saw: all in seconds."""

    gaps: list[float] = field(factory=list)  # between two parts of a stream
    firsts: list[float] = field(factory=list)  # until the first part
    probes: list[float] = field(factory=list)  # until a short answer to 8 KB
    healths: list[float] = field(factory=list)  # until an answer of /health
    broken: int = 0  # streams that did not end as they should
    pending: dict[int, float] = field(factory=dict)  # since when a stream has waited

    def figures(self) -> dict[str, Any]:
        """All of it, with gaps that are still open, and from now on anew."""
        now = time.perf_counter()
        gaps = [*self.gaps, *(now - since for since in self.pending.values())]
        timings = {"gaps": gaps, "firsts": self.firsts, "probes": self.probes}
        figures = {**timings, "healths": self.healths, "broken": self.broken}
        self.gaps, self.firsts, self.probes, self.healths = [], [], [], []
        self.broken = 0
        return figures


async def stream(port: int, number: int, seen: Seen) -> None:
    """One answer. Raises OSError if it does not end as it should."""
    fields = {"prompt": f"def f{number}(", "max_tokens": TOKENS, "ignore_eos": True}
    data = request("/v1/completions", json.dumps({**fields, "stream": True}).encode())
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        began = time.perf_counter()
        seen.pending[number] = began
        writer.write(data)
        last, end = 0.0, b""
        while chunk := await reader.read(1 << 16):
            now = time.perf_counter()
            if last:
                seen.gaps.append(now - last)
            else:
                seen.firsts.append(now - began)
            last = seen.pending[number] = now
            end = chunk[-len(END) :]
        if end != END:
            raise ConnectionError("an answer was cut off")
    finally:
        del seen.pending[number]
        writer.close()


async def client(port: int, number: int, seen: Seen) -> None:
    """One answer after the other."""
    while True:
        try:
            await stream(port, number, seen)
        except OSError:
            seen.broken += 1
            await asyncio.sleep(RETRY_SECONDS)


async def probe(port: int, seen: Seen, name: str, data: bytes) -> None:
    """Send a request again and again, and note in `name` how long each answer takes."""
    while True:
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(data)
            line = await reader.readline()
            writer.close()
            if b" 200 " not in line:
                seen.broken += 1
        except OSError:
            seen.broken += 1
        getattr(seen, name).append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_SECONDS)


async def main(port: int, first: int, streams: int) -> None:
    """Stream, and tell on each line of standard input."""
    seen = Seen()
    numbers = range(first, first + streams)
    tasks = [asyncio.ensure_future(client(port, number, seen)) for number in numbers]
    if first == 0:
        short = request("/v1/completions", json.dumps(PROBE).encode())
        for name, data in (("probes", short), ("healths", HEALTH.encode())):
            tasks.append(asyncio.ensure_future(probe(port, seen, name, data)))
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(seen.figures()), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
