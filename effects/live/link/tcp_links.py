"""Links between machines: an engine here, and fronts elsewhere, over TCP.

A front dials, both prove that they know the deployment's secret (`handshake`), and from
there on it is a link as any other one. The engine lets fronts in when it is ready, and
only those with the same version of minfer and the same model; a front that is refused
serves without it, and tries again.

When the network between them fails, both ends notice within some ten seconds: the system
probes the connection, and an engine sends its state all the time.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from minfer.effects.execution.tiers.peers.addresses import CUT, Port, port_text
from minfer.effects.execution.tiers.peers.door import Door, connect
from minfer.effects.execution.tiers.peers.framing import PeerError, Socket
from minfer.effects.execution.tiers.peers.handshake import Terms
from minfer.effects.execution.warming.start_progress import START
from minfer.effects.live.link.remote import Remote
from minfer.effects.live.link.sockets import LinkClient, LinkServer
from minfer.version import __version__

RETRY: Final = 0.5  # seconds between two attempts
# Seconds in which an engine that died should have a new address; without one, no machine
# may have room for it.
PLACED: Final = 10.0
_LOOK: Final = 0.5  # seconds between two looks for silence
_WHOM: Final = "a front of another machine"
_log = logging.getLogger("minfer.link")
_start_log = logging.getLogger(START)  # what it says is shown
Result = TypeVar("Result")


def link_terms(model: bytes, device: str, block_size: int, secret: bytes) -> Terms:
    """What a front and an engine have to have in common, so that the front's own engines
    can use KV blocks of this one.
    """
    said = repr((model, device, block_size)).encode()
    layout = hashlib.blake2b(said, digest_size=16).digest()
    return Terms(purpose="link", version=__version__, layout=layout, secret=secret)


def own_terms(secret: bytes) -> Terms:
    """What an engine and the fronts of its own server have in common: a secret that
    nobody else has. That they have read the same model is checked as on one machine.
    """
    return Terms(purpose="own link", version=__version__, layout=b"", secret=secret)


def let_in(server: LinkServer, sock: Socket, terms: Terms) -> Door:
    """Accept links of fronts on other machines at a socket that listens."""

    def enter(connection: Socket, name: str) -> None:
        _start_log.info("%s (%s) is linked", _WHOM, name)
        server.take(connection)

    door = Door(sock, terms, enter, _WHOM)
    door.start()
    return door


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
            await asyncio.sleep(RETRY)
            continue
        last, where = time.monotonic(), port_text(address)
        try:
            sock = await _in_thread(lambda: _dial(address, terms, name))
        except (PeerError, OSError) as error:
            if str(error) != said:  # the same one is logged once
                said = str(error)
                _log.warning("the engine at %s cannot be used: %s", where, said)
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
            _log.warning("the link to the engine at %s is over", where)
        await asyncio.sleep(RETRY)


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
