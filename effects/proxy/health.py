"""Health of the backends behind a router: each is probed every few seconds.

    GET /health refused, or 5xx                it has left
    GET /health without an answer, 3 times     it has left
    GET /health well, GET /ready 503           it drains: what runs there goes on
    GET /health well, else                     it takes requests; vLLM has no /ready

Each time a backend answers, its models are read, too (`backend_models`).

A backend that refuses the connection of a client's request has left at once; after any
failed request it is probed again at once. While it does not answer, requests whose answer
has not begun may move to another backend (`note_silent`).
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Final

import aiohttp
from attrs import define, evolve, field, frozen

from minfer.effects.proxy.backend_dispatcher import BackendDispatcher
from minfer.effects.proxy.backend_models import (
    MAX_LIST_BYTES,
    MODELS_PATH,
    ModelList,
    read_models,
)
from minfer.effects.proxy.bounded_read import read_at_most

PROBE_INTERVAL_SECONDS: Final = 2.0  # between two probes
PROBE_TIMEOUT_SECONDS: Final = 5.0  # for an answer
MAX_SILENT_PROBES: Final = 3  # probes in a row without an answer: then it has left
_SERVER_ERROR: Final = 500
_UNAVAILABLE: Final = 503
_log: Final = logging.getLogger("minfer.router")


class ServerHealth(Enum):
    """The result of a probe of a backend."""

    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    GONE = "gone"
    SILENT = "silent"


_HEALTHY: Final = (ServerHealth.READY, ServerHealth.DRAINING)


@define(eq=False)
class HealthWatch:
    """Probes one backend, and notifies the dispatcher."""

    name: str  # its base URL
    http: aiohttp.ClientSession
    dispatcher: BackendDispatcher
    # Called when its process seems to have ended: it refused a connection.
    note_gone: Callable[[], None] = field(default=lambda: None)
    # Called for each unanswered probe, from the third in a row on.
    note_silent: Callable[[], None] = field(default=lambda: None)
    # Called with its models, whenever it has answered.
    note_models: Callable[[ModelList], None] = field(default=lambda _: None)
    health: ServerHealth = field(default=ServerHealth.DOWN, init=False)
    silent: int = field(default=0, init=False)  # times in a row
    _probe_requested: asyncio.Event = field(factory=asyncio.Event, init=False)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            try:
                async with asyncio.timeout(PROBE_INTERVAL_SECONDS):
                    await self._probe_requested.wait()
            except TimeoutError:
                pass
            self._probe_requested.clear()
            await self.probe()

    async def probe(self) -> None:
        """Probe now, and act on the result."""
        health = await self._probe_health()
        self.silent = self.silent + 1 if health is ServerHealth.SILENT else 0
        if health is ServerHealth.SILENT and self.silent < MAX_SILENT_PROBES:
            return
        self._note(health)
        if health is ServerHealth.SILENT:
            self.note_silent()

    def note_failure(self, *, refused: bool) -> None:
        """Note that a request failed there."""
        if refused:
            self._note(ServerHealth.GONE)
        self._probe_requested.set()

    def _note(self, health: ServerHealth) -> None:
        if health is not self.health:
            level = logging.INFO if health is ServerHealth.READY else logging.WARNING
            _log.log(level, "%s is %s", self.name, health.value)
        self.health = health
        if health is ServerHealth.READY:
            self.dispatcher.join(self.name)
        elif health is ServerHealth.DRAINING:
            self.dispatcher.drain(self.name)
        else:
            self.dispatcher.leave(self.name)
        if health is ServerHealth.GONE:
            self.note_gone()

    async def _probe_health(self) -> ServerHealth:
        try:
            if (await self._get("/health")).status >= _SERVER_ERROR:
                return ServerHealth.DOWN
            ready = await self._get("/ready")
        except aiohttp.ClientConnectorError:
            return ServerHealth.GONE
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return ServerHealth.SILENT
        await self._read_models(ready.body)
        return (
            ServerHealth.DRAINING if ready.status == _UNAVAILABLE else ServerHealth.READY
        )

    async def _read_models(self, ready: bytes) -> None:
        """Note its models; `ready`, its answer to /ready, may name them without a key."""
        try:
            listed = read_models((await self._get(MODELS_PATH)).body)
        except (aiohttp.ClientError, OSError):
            return  # it is probed again
        own = read_models(ready)  # without adapters, but for whether there are any
        names = listed.names or own.names
        self.note_models(
            evolve(listed, names=names, takes_adapters=own.takes_adapters, own=own.names)
        )

    async def _get(self, path: str) -> "_Answer":
        request = self.http.get(
            self.name + path,
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS),
            allow_redirects=False,
        )
        async with request as response:
            body = await read_at_most(response.content, MAX_LIST_BYTES)
            return _Answer(response.status, body or b"")


@frozen
class _Answer:
    status: int
    body: bytes
