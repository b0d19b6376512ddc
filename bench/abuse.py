"""What one client's abuse costs its neighbours: `minfer serve` under each attack.

Four well-behaved clients stream; beside them one attacker sends, again and again, the
requests that once stalled everybody. For each attack: the longest silence between two
parts of a neighbour's stream, the 99th percentile of these, the longest that a probe (a
body of 8 KB for one token) waited for its answer, and the memory of all the server's
processes afterwards.

    python -m bench.abuse                      # this tree
    python -m bench.abuse --tree ../other      # another one's server, by the same attacks
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
from attrs import define, field

NEIGHBOURS: Final = 4
SECONDS: Final = 6.0  # of each attack
DRIPS: Final = 300  # sockets that send a header a byte at a time
DRIP_EVERY: Final = 0.5  # seconds between two bytes of one
DRIPPING: Final = 14.0  # seconds
TEXT: Final = "a" * 4_000_000
STREAM: Final = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True}

Attack = Callable[[httpx.AsyncClient], Awaitable[str]]


def _body(path: str, **fields: Any) -> Attack:
    """An attack that posts one body, which is written once."""
    data = json.dumps(fields).encode()
    head = {"Content-Type": "application/json"}

    async def attack(http: httpx.AsyncClient) -> str:
        answer = await http.post(f"/v1/{path}", content=data, headers=head)
        return str(answer.status_code)

    return attack


def _message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


ATTACKS: Final[dict[str, tuple[int, Attack]]] = {  # how many at once, and what
    "nothing": (0, _body("completions")),
    "two prompts of 4 MB": (2, _body("completions", prompt=TEXT, max_tokens=1)),
    "two texts of 4 MB in messages": (
        2,
        _body("chat/completions", messages=_message(TEXT)),
    ),
    "a million ids": (1, _body("completions", prompt=[7] * 1_000_000, max_tokens=1)),
    "120,000 content parts": (
        1,
        _body(
            "chat/completions",
            messages=_message([{"type": "text", "text": ""}] * 120_000),
        ),
    ),
    "200,000 keys for the template": (
        1,
        _body(
            "chat/completions",
            messages=_message("x"),
            chat_template_kwargs={f"k{i}": 1 for i in range(200_000)},
        ),
    ),
    "4,096 prompts in one request": (
        1,
        _body("completions", prompt=[[i % 999, 5] for i in range(4096)], max_tokens=64),
    ),
}


@define
class Seen:
    """What neighbours and the probe saw during one attack."""

    gaps: list[float] = field(factory=list)  # seconds between parts of a stream
    probes: list[float] = field(factory=list)  # seconds to an answer
    answers: list[str] = field(factory=list)  # statuses that the attacker got

    def row(self, name: str, memory: int) -> dict[str, Any]:
        """The figures, in milliseconds and megabytes."""
        ordered = sorted(self.gaps) or [0.0]
        return {
            "attack": name,
            "longest_gap_ms": round(1000 * ordered[-1], 1),
            "p99_gap_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 1),
            "longest_probe_ms": round(1000 * max(self.probes, default=0), 1),
            "memory_mb": memory,
            "attacker_got": {one: self.answers.count(one) for one in set(self.answers)},
        }


async def neighbour(http: httpx.AsyncClient, seen: Seen) -> None:
    """Stream, one text after the other."""
    while True:
        body = {**STREAM, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            last = 0.0
            async for _ in answer.aiter_raw():
                now = time.perf_counter()
                if last:
                    seen.gaps.append(now - last)
                last = now


async def probe(http: httpx.AsyncClient, seen: Seen) -> None:
    """Ask for one token after a body of 8 KB, again and again."""
    ids = [i % 999 for i in range(1600)]
    while True:
        begun = time.perf_counter()
        try:
            answer = await http.post(
                "/v1/completions", json={"prompt": ids, "max_tokens": 1}
            )
            assert answer.status_code == 200, answer.text
        finally:
            seen.probes.append(time.perf_counter() - begun)
        await asyncio.sleep(0.1)


async def attacker(url: str, name: str, seconds: float) -> list[str]:
    """Attack without a pause, from an address of its own; returns the answers."""
    count, attack = ATTACKS[name]
    found: list[str] = []

    async def one(http: httpx.AsyncClient) -> None:
        while True:
            try:
                found.append(await attack(http))
            except httpx.HTTPError as error:
                found.append(type(error).__name__)

    far = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, transport=far) as http,
        beside(*(one(http) for _ in range(count))),
    ):
        await asyncio.sleep(seconds)
    return found


@contextlib.asynccontextmanager
async def beside(*tasks: Any) -> AsyncIterator[None]:
    """Meanwhile these run."""
    running = [asyncio.ensure_future(one) for one in tasks]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def under(url: str, name: str, pid: int, seconds: float) -> dict[str, Any]:
    """The figures of one attack. The attacker is a process, so as not to delay ours."""
    seen = Seen()
    command = [sys.executable, "-m", "bench.abuse", "--attacker", url, "--attacks", name]
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        beside(*(neighbour(http, seen) for _ in range(NEIGHBOURS))),
    ):
        hostile = await asyncio.create_subprocess_exec(
            *command, f"--seconds={seconds}", stdout=subprocess.PIPE
        )
        assert hostile.stdout is not None
        await hostile.stdout.readline()  # it begins
        seen.gaps.clear()
        async with beside(probe(http, seen)):
            said, _ = await hostile.communicate()
    seen.answers = json.loads(said)
    await asyncio.sleep(2.0)
    return seen.row(name, memory_of(pid))


async def drips(port: int, pid: int) -> dict[str, Any]:
    """How many sockets that drip headers stay open, and for how long."""
    links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(DRIPS)]
    ends = [asyncio.ensure_future(reader.read()) for reader, _ in links]
    end = time.monotonic() + DRIPPING
    while time.monotonic() < end:
        for end_of_link, (_, writer) in zip(ends, links, strict=True):
            if not end_of_link.done():
                writer.write(b"X")
        await asyncio.sleep(DRIP_EVERY)
    still = sum(not one.done() for one in ends)
    for _, writer in links:
        writer.close()
    told = {"attack": "header drips", "open_after_s": DRIPPING, "open": still}
    return {**told, "of": DRIPS, "memory_mb": memory_of(pid)}


def memory_of(pid: int) -> int:
    """Megabytes of a process and all below it; what they share counts once for each."""
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}  # KB
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = status.read_text().splitlines()
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
            one = int(status.parent.name)
            parents[one] = int(facts["PPid"])
            sizes[one] = int(facts.get("VmRSS", "0 kB").split()[0])
    family = {pid}
    while more := {one for one, by in parents.items() if by in family} - family:
        family |= more
    return sum(sizes.get(one, 0) for one in family) // 1024


@contextlib.contextmanager
def served(tree: Path, *options: str) -> Iterator[tuple[str, int]]:
    """A server of a tree: its address, and its process."""
    command = [sys.executable, "-m", "minfer", "serve", "--port", "0", *options]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, cwd=tree
    ) as running:
        assert running.stdout is not None
        try:
            ready = running.stdout.readline()
            yield ready.split()[-1].removesuffix("/v1"), running.pid
        finally:
            running.terminate()
            running.wait(30)


def main() -> int:
    """Attack, and print a line for each attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS, "header drips"])
    parser.add_argument("options", nargs="*", help="of minfer serve, after --")
    parser.add_argument("--attacker", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attacker:
        print("begun", flush=True)
        attack = attacker(options.attacker, options.attacks[0], options.seconds)
        print(json.dumps(asyncio.run(attack)))
        return 0
    for name in options.attacks:
        with served(options.tree.resolve(), *options.options) as (url, pid):
            if name == "header drips":
                row = asyncio.run(drips(int(url.rsplit(":", 1)[1]), pid))
            else:
                row = asyncio.run(under(url, name, pid, options.seconds))
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
