"""A server of several processes under load, some of which are killed: what its clients
see.

Every body is asked once while nothing happens; later requests for it must get the
same, however many engines die meanwhile. Log-probabilities may differ in the last bits,
as who else is in a batch does. So may tokens where numbers are coarse, as in bfloat16:
there an answer must have as many as it should, and its text must be theirs.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from math import isclose
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from attrs import define, field, frozen

ENGINE = "minfer engine"
API_SERVERS = ("minfer api 0", "minfer api 1")
SOON = 60.0  # seconds for what takes a few
DETECTED = 15.0  # seconds until a stopped rank is gone: 10, and for its end
CLOSE = 1e-3  # of log-probabilities
REPLACEMENT = "\ufffd"
SPECIAL = re.compile(r"<\|\w+\|>")  # a token that is not part of a text
SERVE = ["serve", "--port=0", "--api-processes=2"]
BROKEN = (httpx.HTTPError, json.JSONDecodeError, KeyError)  # of a stream that is cut


@frozen
class Process:
    """A process of this machine that has not ended."""

    name: str
    parent: int


def processes() -> dict[int, Process]:
    """All that have not ended, by their ids."""
    running = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, fields = path.read_text().partition("(")[2].rpartition(") ")
            state, parent = fields.split()[:2]
            if state != "Z":
                running[int(path.parent.name)] = Process(name, int(parent))
    return running


@define(eq=False)
class Server:
    """`minfer serve`, and its processes."""

    process: subprocess.Popen[str]
    url: str = ""
    # Status of /health, /ready and /v1/models, asked again and again while it began.
    begun: list[tuple[int, ...]] = field(factory=list)

    def children(self) -> dict[str, int]:
        """Process ids by name."""
        parent = self.process.pid
        return {
            process.name: i
            for i, process in processes().items()
            if process.parent == parent
        }

    def ranks(self) -> list[int]:
        """The processes of the engine's ranks, rank 0 first."""
        engine = self.children()[ENGINE]
        return [
            engine,
            *(i for i, process in processes().items() if process.parent == engine),
        ]

    def drain(self) -> None:
        """Read and forget what it says of deaths: a pipe that nobody reads would fill."""
        assert self.process.stderr is not None
        Thread(target=self.process.stderr.read, daemon=True).start()

    def kill(self, name: str = ENGINE, signal_number: int = signal.SIGKILL) -> int:
        """Kill a process, or send it another signal; returns its id."""
        pid = self.children()[name]
        os.kill(pid, signal_number)
        return pid

    async def successor(self, name: str, before: int) -> int:
        """Wait for the process that takes the place of one that was killed."""
        async with asyncio.timeout(SOON):
            while (now := self.children().get(name, before)) == before:
                await asyncio.sleep(0.005)
        return now

    async def lose(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Kill a rank, or send it another signal; wait until all have ended, and for the
        engine that takes their place.
        """
        before = self.ranks()
        os.kill(before[rank], signal_number)
        async with asyncio.timeout(DETECTED):
            while processes().keys() & before:
                await asyncio.sleep(0.005)
        await self.successor(ENGINE, before[0])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SOON)

    async def until_ready(self) -> None:
        """Wait until all API servers serve: each connection is one's or the other's."""
        async with asyncio.timeout(SOON), httpx.AsyncClient(timeout=SOON) as client:
            good = 0
            while good < 6:
                head = {"connection": "close"}
                answer = await client.get(f"{self.url}/ready", headers=head)
                good = good + 1 if answer.status_code == 200 else 0
                await asyncio.sleep(0.01)


@contextlib.contextmanager
def server(*options: str, wait: bool = True, module: str = "minfer") -> Iterator[Server]:
    """A server, which is ready if it is waited for; `module` is its program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", module, *SERVE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        started = Server(process)
        try:
            if wait:
                assert process.stdout is not None
                started.url = process.stdout.readline().split()[-1].removesuffix("/v1")
            yield started
        finally:
            process.kill()


# --- what is asked ----------------------------------------------------------------------


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds that are answered differently, `count` of each."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.7, "n": 2, "max_tokens": tokens // 2},
        {"temperature": 0, "stop": ["return", "    def "], "prompt": "class File{}:\n"},
        {"temperature": 0.5, "logprobs": 2},
    ]
    usual = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    return [
        {"prompt": f"def f{i}(", **usual, "seed": i, **kind}
        | {"prompt": kind.get("prompt", "def f{}(").format(i)}
        for i in range(count)
        for kind in kinds
    ]


def long_bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """The same with prompts of several KV blocks, which share nothing."""
    code = "".join(f"x{i} = {i}\n" for i in range(60))
    return [
        {**body, "prompt": f"# {number}\n{code}" + body["prompt"]}
        for number, body in enumerate(bodies(count, tokens))
    ]


@define(eq=False)
class ClientAnswer:
    """An answer, as its client heard it."""

    text: dict[int, str] = field(factory=dict)  # by choice
    ends: dict[int, str] = field(factory=dict)
    tokens: dict[int, list[str]] = field(factory=dict)  # with log-probabilities
    offsets: dict[int, list[int]] = field(factory=dict)  # of these, in the text
    logprobs: list[float] = field(factory=list)
    times: list[float] = field(factory=list)  # of events
    error: str = ""
    done: bool = False

    def take(self, data: dict[str, Any]) -> None:
        """Take an event."""
        self.times.append(time.monotonic())
        if "error" in data:
            self.error = str(data["error"])
            return
        for choice in data["choices"]:
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]
            if beside := choice.get("logprobs"):
                self.tokens.setdefault(index, []).extend(beside["tokens"])
                self.offsets.setdefault(index, []).extend(beside["text_offset"])
                self.logprobs += beside["token_logprobs"]

    def equals(self, other: "ClientAnswer") -> bool:
        """Whether a client would see no difference."""
        near = zip(self.logprobs, other.logprobs, strict=False)
        return (
            self.text == other.text
            and self.ends == other.ends
            and self.tokens == other.tokens
            and all(isclose(a, b, abs_tol=CLOSE) for a, b in near)
        )

    def flaw(self, body: dict[str, Any]) -> str:
        """What is wrong with this answer, whichever tokens it should have; or nothing."""
        if sorted(self.ends) != [*range(body.get("n", 1))]:
            return f"choices {sorted(self.ends)} ended"
        flaws = (self._flaw(choice, body) for choice in sorted(self.ends))
        return next(filter(None, flaws), "")

    def _flaw(self, choice: int, body: dict[str, Any]) -> str:
        if "logprobs" not in body:
            return ""
        tokens, text = self.tokens[choice], self.text[choice]
        stopped = self.ends[choice] == "stop"
        if not stopped and len(tokens) != body["max_tokens"]:
            return f"choice {choice} has {len(tokens)} tokens"
        spelled = "".join(token for token in tokens if not SPECIAL.fullmatch(token))
        if REPLACEMENT in spelled:  # a character in several tokens: lengths do not add up
            return ""
        sizes = (0 if SPECIAL.fullmatch(token) else len(token) for token in tokens)
        *offsets, _ = accumulate(sizes, initial=0)
        if self.offsets[choice] != offsets:
            return f"choice {choice} has tokens that do not follow one another"
        if spelled != text and not (stopped and spelled.startswith(text)):
            return f"choice {choice} has the text {text!r} and the tokens {tokens}"
        return ""


async def events(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream, then None where its end is marked."""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            yield {"error": f"{answer.status_code}: {answer.text}"}
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                yield None
            elif line:
                yield json.loads(line.removeprefix("data: "))


async def ask(
    url: str, body: dict[str, Any], answer: ClientAnswer | None = None, name: str = ""
) -> ClientAnswer:
    """Ask, and hear all of the answer; `answer` has what came so far, and `name` is the
    request's id, if the client chooses it.
    """
    answer = answer or ClientAnswer()
    head = {"x-request-id": name} if name else {}
    async with httpx.AsyncClient(timeout=SOON, headers=head) as client:
        try:
            async for event in events(client, url, body):
                if event is None:
                    answer.done = True
                else:
                    answer.take(event)
        except BROKEN as error:
            answer.error = answer.error or repr(error)
    if not answer.done and not answer.error:
        answer.error = "it was cut"
    return answer


@define(eq=False)
class Load:
    """Clients that ask for the same again and again, and compare."""

    url: str
    bodies: Sequence[dict[str, Any]]
    right: list[ClientAnswer] = field(factory=list)
    live: list[ClientAnswer] = field(factory=list)  # answers that are under way
    ended: list[tuple[int, ClientAnswer]] = field(
        factory=list
    )  # which body, and its answer
    stopping: bool = False

    async def learn(self) -> None:
        """Ask for everything while nothing happens."""
        for body in self.bodies:
            answer = await ask(self.url, body)
            assert answer.done, answer.error
            self.right.append(answer)

    async def once(self, number: int) -> ClientAnswer:
        """Ask for one of the bodies."""
        answer = ClientAnswer()
        self.live.append(answer)
        await ask(self.url, self.bodies[number % len(self.bodies)], answer)
        self.live.remove(answer)
        self.ended.append((number % len(self.bodies), answer))
        return answer

    @contextlib.asynccontextmanager
    async def clients(self, count: int | None = None) -> AsyncIterator[None]:
        """Clients, as many as bodies if it is not said, that ask one request after the
        other; those that are under way at the end of this are waited for.
        """
        count = count or len(self.bodies)
        tasks = [asyncio.create_task(self._client(i, count)) for i in range(count)]
        yield
        self.stopping = True
        await asyncio.wait_for(asyncio.gather(*tasks), SOON)

    async def _client(self, number: int, step: int) -> None:
        """Ask until the load ends."""
        while not self.stopping:
            await self.once(number)
            number += step

    def lost(self) -> list[str]:
        """Why requests were not answered."""
        return [answer.error for _, answer in self.ended if not answer.done]

    def different(self) -> list[tuple[dict[str, Any], ClientAnswer]]:
        """What was answered otherwise than while nothing happened."""
        answers = [(which, answer) for which, answer in self.ended if answer.done]
        return [
            (self.bodies[which], answer)
            for which, answer in answers
            if not answer.equals(self.right[which])
        ]

    def flawed(self) -> list[tuple[dict[str, Any], str]]:
        """Which answers cannot be right, and why."""
        answers = [
            (self.bodies[which], answer) for which, answer in self.ended if answer.done
        ]
        return [(body, flaw) for body, answer in answers if (flaw := answer.flaw(body))]

    async def flows(self, since: float) -> None:
        """Wait until some stream goes on."""
        async with asyncio.timeout(SOON):
            while not any(
                answer.times and answer.times[-1] > since for answer in self.live
            ):
                await asyncio.sleep(0.005)
