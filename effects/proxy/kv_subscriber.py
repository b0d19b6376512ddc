"""Listens to a server's stream of KV events over ZeroMQ, as vLLM publishes it.

    PUB     topic, number (8 bytes, big-endian), batch
    ROUTER  a first number --> the batches from there on that are kept, then number -1

Where a number is missing, missed batches are asked for at the second address, if there is
one. If they are not kept any more, the cache counts as unknown until blocks are stored
again. A number that is not above the last one shows that the server was started again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import zmq
import zmq.asyncio
from attrs import define, field

from minfer.effects.proxy.backends import KvSource
from minfer.effects.proxy.kv_events import KvEventError, ReportedCache
from minfer.routing.messages import RouterEvent

_NUMBER_BYTES: Final = 8
_LAST_NUMBER: Final = -1
_MAX_MESSAGE_BYTES: Final = 2**26  # of a message
_REPLAY_TIMEOUT_SECONDS: Final = 5.0  # for the next batch that is sent again
_log: Final = logging.getLogger("minfer.router")


@define(eq=False)
class KvSubscriber:
    """Follows one server; `apply` gets what its events mean."""

    source: KvSource
    cache: ReportedCache
    apply: Callable[..., None]
    _next: int = field(default=0, init=False)  # the number of the next batch
    _last_published: int = field(default=-1, init=False)  # the number of that batch

    def restart(self) -> None:
        """Note that the server has ended: the next one begins anew."""
        self._next, self._last_published = 0, -1
        self.apply(self.cache.note_restart())

    async def run(self) -> None:
        """Follow until cancelled, or until ZeroMQ fails, which is logged."""
        context = zmq.asyncio.Context()
        try:
            await self._follow(context)
        except zmq.ZMQError as error:
            _log.error("%s cannot be followed: %s", self.source.events, error)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: "zmq.asyncio.Context") -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.subscribe(b"")
        socket.connect(self.source.events)
        await self._catch_up(context)
        while True:
            frames = await socket.recv_multipart()
            number = _number_of(frames[1:])
            if number is not None:
                await self._read_in_order(number, frames[2], context)

    async def _read_in_order(
        self, number: int, batch: bytes, context: "zmq.asyncio.Context"
    ) -> None:
        """Read a batch, after those that were missed before it."""
        if number <= self._last_published:  # the server was started again
            self.restart()
        self._last_published = number
        if number > self._next:
            await self._catch_up(context)
        if number > self._next:  # some are not kept any more
            self.apply(self.cache.note_missed())
            self._next = number
        if number == self._next:  # else it came with those that were missed
            self._read(number, batch)

    async def _catch_up(self, context: "zmq.asyncio.Context") -> None:
        """Read the batches from the next one on that the server has kept."""
        async for number, batch in self._replay(context):
            if number > self._next:
                self.apply(self.cache.note_missed())
            if number >= self._next:
                self._read(number, batch)

    async def _replay(
        self, context: "zmq.asyncio.Context"
    ) -> AsyncIterator[tuple[int, bytes]]:
        if not self.source.replay:
            return
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", self._next.to_bytes(_NUMBER_BYTES, "big")])
            while True:
                async with asyncio.timeout(_REPLAY_TIMEOUT_SECONDS):
                    frames = await socket.recv_multipart()
                number = _number_of(frames[1:])
                if number is None or number == _LAST_NUMBER:
                    return
                yield number, frames[2]
        except TimeoutError:
            _log.warning("%s does not answer", self.source.replay)
        finally:
            socket.close(linger=0)

    def _read(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events: list[RouterEvent] = self.cache.read(batch)
        except KvEventError as error:
            _log.warning("%s: %s", self.source.events, error)
            events = [self.cache.note_missed()]
        if events:
            self.apply(*events)


def _number_of(frames: list[Any]) -> int | None:
    """The number at the head of a message; None if it is not one of this protocol."""
    is_valid = len(frames) == 2 and len(frames[0]) == _NUMBER_BYTES
    return int.from_bytes(frames[0], "big", signed=True) if is_valid else None
