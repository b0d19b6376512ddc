"""Health of the backends behind a router: each is asked every few seconds.

    GET /health refused, or 5xx                it has left
    GET /health without an answer, 3 times     it has left
    GET /health well, GET /ready 503           it drains: what runs there goes on
    GET /health well, else                     it takes requests; vLLM has no /ready

The answer to /ready or GET /v1/models names its models.

A backend that refuses the connection of a client's request has left at once; after any
failed request it is asked again at once.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import aiohttp
from attrs import define, field

from minfer.effects.serving.router.backend_models import (
    MODELS_PATH,
    BackendModels,
    model_names,
)
from minfer.effects.serving.router.dispatcher import Dispatcher

INTERVAL: Final = 2.0  # seconds between two questions
PATIENCE: Final = 5.0  # seconds for an answer
_MOST_SILENT: Final = 3  # questions in a row without an answer: then it has left
_FAILED: Final = 500
_UNREADY: Final = 503
_MAX_ANSWER_BYTES: Final = 2**20
_log: Final = logging.getLogger("minfer.router")


class Health(Enum):
    """What was found out about a backend."""

    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    GONE = "gone"
    SILENT = "silent"


@define(eq=False)
class HealthWatch:
    """Asks one backend, and tells the dispatcher."""

    name: str  # its base URL
    http: aiohttp.ClientSession
    dispatcher: Dispatcher
    # Called when its process seems to have ended: it refused a connection.
    note_gone: Callable[[], None] = field(default=lambda: None)
    health: Health = field(default=Health.DOWN, init=False)
    silent: int = field(default=0, init=False)  # times in a row
    models: BackendModels = field(factory=BackendModels)  # of all backends
    _asked: asyncio.Event = field(factory=asyncio.Event, init=False)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self.ask()

    async def ask(self) -> None:
        """Ask now, and act on it."""
        found = await self._question()
        self.silent = self.silent + 1 if found is Health.SILENT else 0
        if found is Health.SILENT and self.silent < _MOST_SILENT:
            return
        self._note(found)

    def failed(self, *, refused: bool) -> None:
        """A request failed there."""
        if refused:
            self._note(Health.GONE)
        self._asked.set()

    def _note(self, found: Health) -> None:
        if found is not self.health:
            level = logging.INFO if found is Health.READY else logging.WARNING
            _log.log(level, "%s is %s", self.name, found.value)
        self.health = found
        if found is Health.READY:
            self.dispatcher.join(self.name)
        elif found is Health.DRAINING:
            self.dispatcher.drain(self.name)
        else:
            self.dispatcher.leave(self.name)
        if found is Health.GONE:
            self.note_gone()

    async def _question(self) -> Health:
        try:
            if await self._status("/health") >= _FAILED:
                return Health.DOWN
            status, answer = await self._answer("/ready")
            unready = status == _UNREADY
            await self._note_models(answer)
        except aiohttp.ClientConnectorError:
            return Health.GONE
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return Health.SILENT
        return Health.DRAINING if unready else Health.READY

    async def _note_models(self, ready: Any) -> None:
        """Note the backend's models, of its answer to /ready or its list of models."""
        names = model_names(ready)
        if not names:
            _, listed = await self._answer(MODELS_PATH)
            names = model_names(listed)
        self.models.note(self.name, names)

    async def _status(self, path: str) -> int:
        return (await self._answer(path))[0]

    async def _answer(self, path: str) -> tuple[int, Any]:
        """The status of an answer, and its JSON, if it is any."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        get = self.http.get(self.name + path, timeout=timeout, allow_redirects=False)
        async with get as response:
            data = await response.content.read(_MAX_ANSWER_BYTES)
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, None
