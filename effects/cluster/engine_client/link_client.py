"""An API server's end of its links, in its event loop: to engines of this machine over
local sockets, and to those of other machines over TCP.

An API server dials, and both introduce themselves (`handshake`). Its own engines let it
in from their start on. Those of another server do when they are ready, if it knows the
secret and has the same model; an API server that is refused serves without them, and
tries again. When the network between two machines fails, both ends notice within some ten
seconds: the system probes the connection, and an engine sends its state all the time.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final, Never, TypeVar, cast

from attrs import frozen

from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.execution.warming.start_progress import START
from minfer.effects.net.addresses import DEAD_PEER_SECONDS, Address, address_text
from minfer.effects.net.framing import (
    EndedError,
    FrameReader,
    PeerError,
    Socket,
    frame,
)
from minfer.effects.net.handshake import Terms
from minfer.effects.net.listener import connect

# In which an engine that died should have a new address; without one, no machine may have
# room for it.
ADDRESS_SECONDS: Final = 10.0
_READ_BYTES: Final = 2**18  # at once
_SILENCE_CHECK_SECONDS: Final = 0.5  # between two checks for silence
log = logging.getLogger("minfer.link")
_start_log = logging.getLogger(START)  # what it says is shown
Result = TypeVar("Result")


@frozen(kw_only=True)
class LinkSettings:
    """How links to engines are kept, by where the engines are."""

    retry: float  # seconds between two attempts to connect
    silence: float  # seconds without a message, after which the link is cut
    logged: bool  # whether links and engines that are missing are logged


# The system reports the end of a process at once, and the supervisor logs it.
SAME_MACHINE: Final = LinkSettings(retry=0.05, silence=inf, logged=False)
OTHER_MACHINE: Final = LinkSettings(retry=0.5, silence=DEAD_PEER_SECONDS, logged=True)


@frozen(kw_only=True)
class LinkedEngine:
    """An engine that an API server is to be linked to."""

    replica: int
    find: Callable[[], Address | None]  # returns its address, if it has one by now
    terms: Terms
    name: str  # by which the API server introduces itself
    settings: LinkSettings = OTHER_MACHINE


class LinkClient(asyncio.Protocol):
    """An API server's end of one link, in its event loop."""

    def __init__(self, remote: RemoteEngine, replica: int) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.last_received = time.monotonic()  # when the engine last sent something
        self.cut = False  # by this API server, or the network: no engine has ended
        self._remote = remote
        self._replica = replica
        self._frames = FrameReader(wire.MAX_MESSAGE_BYTES)
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this API server."""
        self._transport = cast("asyncio.WriteTransport", transport)
        address = transport.get_extra_info("sockname")
        local_address = address[0] if isinstance(address, tuple) else ""
        self._remote.connect(self._send, self._replica, local_address)

    def data_received(self, data: bytes) -> None:
        """Pass the engine's messages on."""
        self.last_received = time.monotonic()
        try:
            for message in self._frames.feed(data):
                self._remote.receive(wire.read_to_api_server(message), self._replica)
        except PeerError as error:
            log.warning("the link to the engine is cut: %s", error)
            self.cut = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the engine has ended, or that the link was closed or cut."""
        if isinstance(exc, ConnectionError):  # a write failed before all was read
            self._read_rest()
        cut = self.cut or not (exc is None or isinstance(exc, ConnectionError))
        try:
            self._remote.disconnect(self._replica, cut=cut)
        finally:  # whatever breaks there, a new link is made
            if not self.over.done():  # its waiter may have been cancelled
                self.over.set_result(None)

    def _read_rest(self) -> None:
        """Read what the engine sent before it ended: the event loop does not."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, _READ_BYTES):
                self.data_received(data)

    def _send(self, message: wire.ToEngine) -> None:
        self._transport.write(frame(wire.encode(message)))


async def keep_linked(remote: RemoteEngine, engine: LinkedEngine) -> Never:
    """Keep a link to an engine, with a new one when it is over, until the task is
    cancelled. If the engine has no address for `ADDRESS_SECONDS`, nothing waits for it
    any more.
    """
    logged_error = ""
    last_found = time.monotonic()  # when it had an address
    while True:
        if (address := engine.find()) is not None:
            last_found = time.monotonic()
            logged_error = await _link_once(remote, engine, address, logged_error)
        elif time.monotonic() > last_found + ADDRESS_SECONDS:
            remote.give_up(engine.replica)
            last_found = inf
        await asyncio.sleep(engine.settings.retry)


async def _link_once(
    remote: RemoteEngine, engine: LinkedEngine, address: Address, logged_error: str
) -> str:
    """Link an engine, if it lets this API server in, until the link is over; returns why
    it does not. The `logged_error` is not logged again.
    """
    is_logged = engine.settings.logged
    try:
        sock = await _in_thread(lambda: _dial(address, engine))
    except (PeerError, OSError) as error:
        is_missing = isinstance(error, OSError | EndedError)
        if str(error) != logged_error and (is_logged or not is_missing):
            log.warning(
                "the engine at %s cannot be used: %s", address_text(address), error
            )
        return str(error)
    if is_logged:
        _start_log.info("linked to the engine at %s", address_text(address))
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(
        lambda: LinkClient(remote, engine.replica), sock=sock
    )
    try:
        await _wait_until_over(client, engine.settings.silence)
    finally:
        transport.abort()
    if is_logged:
        log.warning("the link to the engine at %s is over", address_text(address))
    return ""


def _dial(address: Address, engine: LinkedEngine) -> Socket:
    sock = connect(address, engine.terms, engine.name)
    sock.setblocking(False)
    return sock


async def _wait_until_over(client: LinkClient, silence: float) -> None:
    while not client.over.done():
        await asyncio.wait([client.over], timeout=_SILENCE_CHECK_SECONDS)
        if time.monotonic() - client.last_received > silence:
            client.cut = True
            return


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Returns what blocking work returns. Unlike `asyncio.to_thread`, the process can end
    meanwhile.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def end(result: Result | None, error: Exception | None) -> None:
        if future.cancelled():
            if isinstance(result, Socket):
                result.close()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # there is no error

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # of any kind: it is raised where it is waited for
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, result, failed)

    threading.Thread(target=run, name="minfer-dial", daemon=True).start()
    return await future
