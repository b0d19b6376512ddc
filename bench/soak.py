"""A server under mixed load for a long time: what of it grows.

`minfer serve` with the bundled model; clients that stream, that ask for whole answers,
several samples, chats, embeddings and counts of tokens, that leave in mid-stream, and
that send what is wrong. Every few seconds each process's memory and descriptors are
noted, and how many KV blocks and requests the engine holds. Slopes are fitted to what was
noted after a warm-up, in which the pool of blocks fills and every kind of request has
come.

    python -m bench.soak --minutes 30
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import numpy
from attrs import field, frozen

from bench.abuse.server import Server, served
from bench.results import ROOT, run, show

NOTE_SECONDS: Final = 5.0  # seconds between two notes
WARM_UP_SHARE: Final = 1 / 6  # of the whole time
CLIENTS: Final = 8
MAX_PAUSE_SECONDS: Final = 0.3  # seconds at most between two requests of a client
OPTIONS: Final = ["--num-gpu-blocks-override", "160", "--api-processes", "2"]
WORDS: Final = ("def", "class", "return", "self", "value", "name", "path", "list", "read")

Client = Callable[["Mix"], Awaitable[None]]


@frozen
class Mix:
    """The clients' connection, their dice, and what they got."""

    http: httpx.AsyncClient
    dice: random.Random
    answers: Counter[str] = field(factory=Counter)

    def prompt(self) -> str:
        """A text of some length; half of them begin alike, as prompts do."""
        words = self.dice.choices(WORDS, k=self.dice.randint(1, 150))
        return ("import os\n" * 30 if self.dice.random() < 0.5 else "") + " ".join(words)

    async def post(self, path: str, body: Mapping[str, Any], want: int = 200) -> None:
        """Ask, and note the kind of request and whether the status was the right one."""
        answer = await self.http.post(path, json=body)
        right = answer.status_code == want
        self.answers[f"{path} {answer.status_code}{'' if right else ' (wrong)'}"] += 1

    async def stream(self, body: Mapping[str, Any], leave_after: float | None) -> None:
        """Read a stream; leave it in the middle, if a part of it is enough."""
        streamed_body = {**body, "stream": True}
        path = "/v1/completions"
        num_lines, enough = 0, None if leave_after is None else leave_after * 40
        async with self.http.stream("POST", path, json=streamed_body) as answer:
            async for _ in answer.aiter_lines():
                num_lines += 1
                if enough is not None and num_lines > enough:
                    self.answers["left"] += 1
                    return
        self.answers[f"stream {answer.status_code}"] += 1


async def streams(mix: Mix) -> None:
    await mix.stream({"prompt": mix.prompt(), "max_tokens": 80}, None)


async def leaves(mix: Mix) -> None:
    body = {"prompt": mix.prompt(), "max_tokens": 400, "ignore_eos": True}
    await mix.stream(body, mix.dice.random())


async def whole(mix: Mix) -> None:
    body = {"prompt": mix.prompt(), "max_tokens": 40, "n": 2, "logprobs": 3}
    await mix.post("/v1/completions", {**body, "stop": ["\n\n", "return"]})


async def several(mix: Mix) -> None:
    prompts = [mix.prompt() for _ in range(4)]
    await mix.post("/v1/completions", {"prompt": prompts, "max_tokens": 20})


async def chats(mix: Mix) -> None:
    messages = [{"role": "user", "content": mix.prompt()}]
    await mix.post("/v1/chat/completions", {"messages": messages, "max_tokens": 30})


async def embeds(mix: Mix) -> None:
    await mix.post("/v1/embeddings", {"input": [mix.prompt(), mix.prompt()]})


async def counts(mix: Mix) -> None:
    await mix.post("/tokenize", {"prompt": mix.prompt()})


async def errs(mix: Mix) -> None:
    body = {"prompt": mix.prompt(), "max_tokens": mix.dice.choice([-1, "x", 10**9])}
    await mix.post("/v1/completions", body, want=400)
    await mix.post("/v1/completions", {"prompt": "a" * 300_000}, want=400)


KINDS: Final[tuple[Client, ...]] = (
    streams,
    leaves,
    whole,
    several,
    chats,
    embeds,
    counts,
    errs,
)


async def client(mix: Mix) -> None:
    """One request of some kind after the other."""
    while True:
        try:
            await mix.dice.choice(KINDS)(mix)
        except httpx.HTTPError as error:
            mix.answers[type(error).__name__] += 1
        await asyncio.sleep(mix.dice.random() * MAX_PAUSE_SECONDS)


@frozen
class Note:
    """What the server held at a moment."""

    time: float  # seconds since the start
    memory: dict[str, float]  # MB of each process, by name and number
    descriptors: int
    blocks_used: float  # share of the pool that live requests hold
    requests: float


def note(server: Server, began: float) -> Note:
    """Look at the server."""
    load = server.load()
    return Note(
        time.monotonic() - began,
        {
            _name(process): server.resident(process) / 1024
            for process in sorted(server.family())
        },
        server.descriptors(),
        load["kv_cache_usage_perc"],
        load["num_requests_running"] + load["num_requests_waiting"],
    )


def _name(process: int) -> str:
    with contextlib.suppress(OSError):
        return f"{Path(f'/proc/{process}/comm').read_text().strip()} {process}"
    return f"ended {process}"


def slope(notes: list[Note], value: Callable[[Note], float]) -> dict[str, float]:
    """The line that fits best: its mean, and what it gains in an hour."""
    hours = [entry.time / 3600 for entry in notes]
    values = [value(entry) for entry in notes]
    gains = float(numpy.polyfit(hours, values, 1)[0])
    return {"mean": float(numpy.mean(values)), "per_hour": gains, "last": values[-1]}


async def watch(server: Server, seconds: float, mix: Mix) -> list[Note]:
    """Put load on, and note what is held."""
    began = time.monotonic()
    tasks = [asyncio.ensure_future(client(mix)) for _ in range(CLIENTS)]
    notes: list[Note] = []
    while time.monotonic() - began < seconds:
        await asyncio.sleep(NOTE_SECONDS)
        notes.append(await asyncio.to_thread(note, server, began))
        if len(notes) % 12 == 0:
            whole_memory = sum(notes[-1].memory.values())
            show({"s": notes[-1].time, "MB": whole_memory, "fd": notes[-1].descriptors})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(2 * NOTE_SECONDS)
    return [*notes, await asyncio.to_thread(note, server, began)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    seconds = 60 * args.minutes
    with served(ROOT, (), OPTIONS) as server:

        async def soak() -> tuple[list[Note], Mix]:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                mix = Mix(http, random.Random(args.seed))
                return await watch(server, seconds, mix), mix

        notes, mix = asyncio.run(soak())
    *under_load, after = [
        entry for entry in notes if entry.time > WARM_UP_SHARE * seconds
    ]
    names = sorted(set.intersection(*(set(entry.memory) for entry in under_load)))
    figures = {
        "minutes": args.minutes,
        "answers": dict(mix.answers),
        "memory_mb": slope(under_load, lambda entry: sum(entry.memory.values())),
        "memory_mb_by_process": {
            name: slope(under_load, lambda entry, name=name: entry.memory[name])  # type: ignore[misc]  # mypy does not infer defaults of lambdas
            for name in names
        },
        "descriptors": slope(under_load, lambda entry: entry.descriptors),
        "blocks_used": slope(under_load, lambda entry: entry.blocks_used),
        "after": {
            "requests": after.requests,
            "blocks_used": after.blocks_used,
            "descriptors": after.descriptors,
            "memory_mb": sum(after.memory.values()),
        },
    }
    show({name: figures[name] for name in ("memory_mb", "descriptors", "blocks_used")})
    return figures


if __name__ == "__main__":
    run("soak", measure, {"--minutes": 30.0, "--seed": 0})
