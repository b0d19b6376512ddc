"""A front's end of its links, in its event loop: to engines of this machine over local
sockets, and to those of other machines over TCP.

Over TCP, a front dials, and both prove that they know the deployment's secret
(`handshake`). The engine lets fronts in when it is ready, and only those with the same
version of minfer and the same model; a front that is refused serves without it, and tries
again. When the network between them fails, both ends notice within some ten seconds: the
system probes the connection, and an engine sends its state all the time.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from minfer.effects.cluster.engine_client.remote import Remote
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.execution.warming.start_progress import START
from minfer.effects.net.addresses import CUT, Port, port_text
from minfer.effects.net.frames import FrameReader, FrameWriter
from minfer.effects.net.framing import PeerError, Socket
from minfer.effects.net.handshake import Terms
from minfer.effects.net.listener import connect

RETRY: Final = 0.05  # seconds between two attempts to connect on this machine
RETRY_ELSEWHERE: Final = 0.5  # and to another one
# Seconds in which an engine that died should have a new address; without one, no machine
# may have room for it.
PLACED: Final = 10.0
_CHUNK: Final = 2**18  # bytes read at once
_LOOK: Final = 0.5  # seconds between two looks for silence
log = logging.getLogger("minfer.link")
_start_log = logging.getLogger(START)  # what it says is shown
Result = TypeVar("Result")


class LinkClient(asyncio.Protocol):
    """A front's end of one link, in its event loop."""

    def __init__(self, remote: Remote, replica: int) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.heard = time.monotonic()  # when the engine last sent something
        self.silent = False  # it was silent for too long, and its link is cut
        self._remote = remote
        self._replica = replica
        self._frames = FrameReader()
        self._numbers = FrameWriter()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this front."""
        self._transport = cast("asyncio.WriteTransport", transport)
        at = transport.get_extra_info("sockname")
        here = at[0] if isinstance(at, tuple) else ""
        self._remote.connect(self._say, self._replica, here)

    def data_received(self, data: bytes) -> None:
        """Pass the engine's messages on."""
        self.heard = time.monotonic()
        try:
            for message in self._frames.feed(data):
                self._remote.receive(wire.read_to_front(message), self._replica)
        except PeerError as error:
            log.warning("the link to the engine is cut: %s", error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the engine has ended, or that the link was closed or cut."""
        if isinstance(exc, ConnectionError):  # a write failed before all was read
            self._read_rest()
        cut = self.silent or not (exc is None or isinstance(exc, ConnectionError))
        self._remote.disconnect(self._replica, cut=cut)
        if not self.over.done():  # its waiter may have been cancelled
            self.over.set_result(None)

    def _read_rest(self) -> None:
        """Read what the engine sent before it ended: the event loop does not."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, _CHUNK):
                self.data_received(data)

    def _say(self, message: wire.ToEngine) -> None:
        self._transport.write(self._numbers.frame(wire.encode(message)))


async def keep_linked(remote: Remote, path: Path, replica: int = 0) -> None:
    """Keep a link to the replica that listens at `path`, with a new one when it is over,
    until the task is cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            transport, client = await loop.create_unix_connection(
                lambda: LinkClient(remote, replica), str(path)
            )
        except OSError:  # there is no engine yet
            pass
        else:
            try:
                await client.over
            finally:
                transport.abort()
        await asyncio.sleep(RETRY)


async def keep_linked_to(
    remote: Remote,
    find: Callable[[], Port | None],
    replica: int,
    terms: Terms,
    name: str,
) -> None:
    """Keep a link to a replica on another machine, with a new one when it is over, until
    the task is cancelled. `find` returns its address, if it has one now; if it has none
    for `PLACED` seconds, nothing waits for it any more.
    """
    loop, said = asyncio.get_running_loop(), ""
    last = time.monotonic()  # when it had an address
    while True:
        if (address := find()) is None:
            if time.monotonic() > last + PLACED:
                remote.give_up(replica)
                last = float("inf")
            await asyncio.sleep(RETRY_ELSEWHERE)
            continue
        last, where = time.monotonic(), port_text(address)
        try:
            sock = await _in_thread(lambda: _dial(address, terms, name))
        except (PeerError, OSError) as error:
            if str(error) != said:  # the same one is logged once
                said = str(error)
                log.warning("the engine at %s cannot be used: %s", where, said)
        else:
            _start_log.info("linked to the engine at %s", where)
            said = ""
            transport, client = await loop.create_connection(
                lambda: LinkClient(remote, replica), sock=sock
            )
            try:
                await _until_over(client)
            finally:
                transport.abort()
            log.warning("the link to the engine at %s is over", where)
        await asyncio.sleep(RETRY_ELSEWHERE)


def _dial(address: Port, terms: Terms, name: str) -> Socket:
    sock = connect(address, terms, name)
    sock.setblocking(False)
    return sock


async def _until_over(client: LinkClient) -> None:
    while not client.over.done():
        await asyncio.wait([client.over], timeout=_LOOK)
        if time.monotonic() - client.heard > CUT:
            client.silent = True
            return


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Returns what blocking work returns. Unlike `asyncio.to_thread`, the process can end
    meanwhile.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def end(result: Result | None, error: Exception | None) -> None:
        if done.cancelled():
            if isinstance(result, Socket):
                result.close()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is no error

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # of any kind: it is raised where it is waited for
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, result, failed)

    threading.Thread(target=run, name="minfer-dial", daemon=True).start()
    return await done
