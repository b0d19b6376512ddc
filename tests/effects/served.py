"""A server in a thread on a free port, with an engine that can be slowed down and
watched.
"""

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from attrs import define, field

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.application import Application
from minfer.effects.serving.processes.server import listen_at
from minfer.effects.serving.wire.connections import bounded
from minfer.effects.serving.wire.websocket import SOCKETS
from minfer.effects.text.grammars.mask_lines import Lines
from minfer.records.messages import (
    Cancel,
    Event,
    Executed,
    Failed,
    Lost,
    Moved,
    TransferCommand,
)
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.state import EngineState, Transition, Turn
from tests.effects.waiting import until


class Slow:
    """An executor whose steps take a while, so that requests can be met while
    they run.
    """

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds
        self.left = math.inf  # steps after which it waits
        self.free = threading.Event()
        self.free.set()

    def launch(self, plan: Plan) -> None:
        self.inner.launch(plan)

    def mask_lines(self, step: int) -> Lines | None:
        lines: Lines | None = self.inner.mask_lines(step)
        return lines

    def sample(self, separate: SampleDeferred) -> None:
        self.inner.sample(separate)

    def move(
        self, command: TransferCommand, report: Callable[[Moved | Lost], None]
    ) -> None:
        self.inner.move(command, report)

    def collect(self) -> Executed | Failed:
        time.sleep(self.seconds)
        self.left -= 1
        assert self.left >= 0 or self.free.wait(60)
        result: Executed | Failed = self.inner.collect()
        return result

    def close(self) -> None:
        self.inner.close()


@define
class Serving:
    """A running server, and what its engine did."""

    llm: AsyncLLM
    service: Application
    url: str
    http: httpx.Client
    turns: list[tuple[tuple[Event, ...], Transition]] = field(factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def __call__(self, turn: Turn) -> None:
        self.turns.append((turn.events, turn.transition))

    def close(self, state: EngineState) -> None:
        """As a driver's record must."""

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/{path}", json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def prompt_of(self, **body: Any) -> str:
        """The prompt of a conversation, as the server counts it."""
        answer = self.http.post(f"{self.url}/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        assert self.llm.tokenizer is not None
        return self.llm.tokenizer.decode(answer.json()["tokens"])

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which must not take long."""
        until(condition)

    def idle(self) -> None:
        """Wait until no request is served."""
        self.until(lambda: not self.llm.worker.driver.busy)

    @contextlib.contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Meanwhile the engine, idle at first, does `steps` steps and no more."""
        self.idle()
        slow: Any = self.llm.worker.driver.executor
        slow.free.clear()
        slow.left = steps
        try:
            yield
        finally:
            slow.left = math.inf
            slow.free.set()

    def available(self) -> int:
        """KV blocks that could be handed out now."""
        return self.llm.worker.driver.state.blocks.available

    def cancelled(self) -> list[bool]:
        """For each turn that took a Cancel: whether two turns later its requests own
        nothing.

        They are out of the engine, and no fence holds back blocks from before it.
        """
        out = []
        for i, (turn_events, _) in enumerate(self.turns):
            names = {event.id for event in turn_events if isinstance(event, Cancel)}
            if names:
                state = self.turns[min(i + 2, len(self.turns) - 1)][1].state
                ids_in_engine = {
                    seq.request.id for seq in (*state.running.seqs, *state.waiting)
                }
                old = self.turns[i][1].state.next_step
                fences = [fence for fence in state.fences if fence.until < old]
                out.append(
                    not (names & ids_in_engine)
                    and not names & set(state.requests)
                    and not fences
                )
        return out


class LoopServer(uvicorn.Server):
    """A server whose event loop is known: what belongs to it is closed there."""

    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


@contextlib.contextmanager
def serving(
    model: str | None = None,
    *,
    names: tuple[str, ...] = ("tiny",),
    step: float = 0.0,
    service: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Serving]:
    """Serve a model; `step`: seconds by which every step is slowed down."""
    llm = AsyncLLM(model, **settings)
    if step:
        llm.worker.driver.deferred.executor = Slow(llm.worker.driver.executor, step)
    app = Application(llm, names, **(service or {}))
    (listener,) = listen_at("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        http=bounded(app.state.bounds.connection_limits),
        log_level="critical",
        lifespan="off",
        **SOCKETS,
    )
    server = LoopServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # Spares reading certificates.
        with httpx.Client(timeout=60, verify=False) as http:  # noqa: S501
            running = Serving(llm, app, url, http)
            llm.worker.driver.record = running
            yield running
    finally:
        server.loop.call_soon_threadsafe(app.close)
        server.should_exit = True
        thread.join()
        llm.close()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; the end must be marked."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
        elif line == "data: [DONE]":
            return
        else:
            assert not line, line
    raise AssertionError("the stream has no end")
