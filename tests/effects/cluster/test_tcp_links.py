"""Links between machines: over TCP, and over networks that fail."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import define, evolve, field

from minfer.effects.cluster.engine_client import link_client
from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.link_client import (
    OTHER_MACHINE,
    LinkedEngine,
    LinkSettings,
    keep_linked,
)
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_server.engine_server import (
    API_SERVER_RETURN_SECONDS,
    EngineServer,
)
from minfer.effects.cluster.engine_server.link_server import LinkServer
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_terms import link_terms
from minfer.effects.live.client import TurnOutputs
from minfer.effects.net.addresses import Port, listen_at
from minfer.effects.net.framing import Socket
from minfer.effects.net.handshake import secret_key
from minfer.routing.policies import Prefix
from minfer.routing.state import RouterConfig
from tests.effects.cluster.ends import READY, MadeUp, request
from tests.effects.network import Network
from tests.effects.waiting import soon

TERMS = link_terms(b"model", "cpu", 4, secret_key("s"))
NEAR = evolve(OTHER_MACHINE, retry=0.01)


@define(eq=False)
class Outside:
    """An engine that API servers of other machines use, over a network that can fail."""

    folder: Any
    engine: MadeUp = field(factory=MadeUp)
    host: EngineServer = field(init=False)
    server: LinkServer = field(init=False)
    sock: Socket = field(init=False)
    network: Network = field(init=False)
    _all: contextlib.ExitStack = field(init=False, factory=contextlib.ExitStack)

    def __attrs_post_init__(self) -> None:
        self.host = EngineServer(None, print)
        self.server = LinkServer(self.host)
        self.server.start()
        self._all.callback(self.server.close)
        self.host.open(self.engine, READY)
        self.engine.now = 2 * API_SERVER_RETURN_SECONDS
        self.sock = listen_at(("127.0.0.1", 0))
        self.server.accept_links(self.sock, TERMS)
        self.network = Network(self.sock.getsockname())
        self._all.callback(self.network.close)

    @property
    def port(self) -> Port:
        return self.network.port

    def close(self) -> None:
        self._all.close()


@pytest.fixture
def outside(tmp_path: Any) -> Iterator[Outside]:
    server = Outside(tmp_path)
    yield server
    server.close()


def remote() -> RemoteEngine:
    """An API server of one engine here, which never comes, and one elsewhere."""
    config = RouterConfig(Prefix(), 4)
    prefill = PrefillFirst(ApiServerRouter(config))
    return RemoteEngine(0, router=ApiServerRouter(config), prefill=prefill, external=1)


def engine(
    find: Callable[[], Port | None], settings: LinkSettings = NEAR, terms: Any = TERMS
) -> LinkedEngine:
    return LinkedEngine(replica=1, find=find, terms=terms, name="f", settings=settings)


def run(
    outside: Outside,
    test: Callable[..., Any],
    settings: LinkSettings = OTHER_MACHINE,
    terms: Any = TERMS,
    count: int = 1,
) -> None:
    """Run a test in an event loop, with an API server that is linked over the network."""

    async def go() -> None:
        api_servers = [remote() for _ in range(count)]
        address = engine(lambda: outside.port, settings, terms)
        tasks = [asyncio.create_task(keep_linked(one, address)) for one in api_servers]
        try:
            await test(*api_servers)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0.01)

    asyncio.run(go())


def linked(api_server: RemoteEngine) -> Callable[[], bool]:
    return lambda: api_server.replicas[1].progress is None


def test_fronts_of_several_machines_share_an_engine(outside: Outside) -> None:
    async def test(first: RemoteEngine, second: RemoteEngine) -> None:
        heard: list[Any] = []
        first.listen(heard.append)
        await soon(lambda: linked(first)() and linked(second)())
        assert first.ready is None, "this says what the engine here is"
        for number, api_server in enumerate((first, second)):
            api_server.submit([request(f"r{number}")])
        await soon(lambda: len(outside.engine.served) == 2)
        outside.engine.say(TurnOutputs(time=0.0, ids=(("r0", 0),), tokens=((7,),)))
        await soon(lambda: bool(heard))
        assert heard[-1].tokens == ((7,),)
        first.reset_cache()
        await soon(lambda: second.resets == 1)
        assert first.replicas[1].local_address == "127.0.0.1"
        second.queries.ask(wire.RequestQuery("r0"), heard.append)
        assert heard[-1] is None, "other servers are not asked for requests"

    run(outside, test, count=2)


def test_an_engine_that_moves_is_found_and_one_without_a_place_is_given_up(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_client, "ADDRESS_SECONDS", 0.1)
    api_server, given_up = remote(), list[int]()
    monkeypatch.setattr(api_server, "give_up", given_up.append)
    place: Port | None = None

    async def go() -> None:
        nonlocal place
        task = asyncio.create_task(keep_linked(api_server, engine(lambda: place)))
        await soon(lambda: given_up == [1])
        place = outside.port
        await soon(linked(api_server))
        assert given_up == [1], "it is said once"
        place = None
        outside.network.cut()
        await soon(lambda: given_up == [1, 1])
        place = outside.sock.getsockname()
        await soon(linked(api_server))
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.01)

    asyncio.run(go())


def test_who_is_refused_says_so_once_and_others_go_on(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(api_server: RemoteEngine) -> None:
        async def stranger(_: RemoteEngine) -> None:
            await asyncio.sleep(0.2)

        await soon(linked(api_server))
        other_terms = evolve(TERMS, secret=secret_key("t"))
        await asyncio.to_thread(run, outside, stranger, NEAR, other_terms)
        assert len(outside.host._sessions) == 1
        api_server.submit([request("a")])
        await soon(lambda: bool(outside.engine.served))

    with caplog.at_level(logging.WARNING):
        run(outside, test, NEAR)
    messages = [record.message for record in caplog.records if "secret" in record.message]
    assert len(messages) == 2  # one here, and one there
    assert all("the secret is another one" in message for message in messages)


@pytest.mark.parametrize("fault", ["cut", "stall", "end"])
def test_a_network_that_fails_is_noticed_and_no_request_is_blamed(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(link_client, "_SILENCE_CHECK_SECONDS", 0.05)

    async def test(api_server: RemoteEngine) -> None:
        await soon(linked(api_server))
        api_server.submit([request("a")])
        await soon(lambda: bool(outside.engine.served))
        [record] = api_server._requests.all()
        record.histories[0].admitted = True
        if fault == "cut":
            outside.network.cut()
        elif fault == "stall":
            outside.network.stalled = True
        else:
            outside.host.end()
            await soon(lambda: not linked(api_server)())
            outside.network.cut()
        await soon(lambda: record.replica is None)
        # Who closes a connection may have died; silence, and an end that was announced,
        # say nothing of requests.
        assert record.histories[0].deaths == (fault == "cut")
        outside.network.heal()
        await soon(linked(api_server))
        await soon(lambda: record.replica == 1)

    run(outside, test, evolve(OTHER_MACHINE, retry=0.05, silence=0.3))


def test_a_link_is_kept_while_the_engine_is_silent_for_less_than_the_limit(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_client, "_SILENCE_CHECK_SECONDS", 0.02)

    async def test(api_server: RemoteEngine) -> None:
        await soon(linked(api_server))
        outside.network.stalled = True
        await asyncio.sleep(0.2)
        assert linked(api_server)()
        outside.network.heal()
        await asyncio.sleep(0.1)
        assert linked(api_server)()

    run(outside, test, evolve(OTHER_MACHINE, retry=0.05, silence=10.0))


CABLE = """
import asyncio, logging, subprocess, sys, tempfile, time
from pathlib import Path
from attrs import evolve
from minfer.effects.net import addresses
from minfer.effects.cluster.engine_client.link_client import OTHER_MACHINE

def ip(*said):
    subprocess.run(["ip", *said], check=True)

ip("link", "set", "lo", "up")
addresses.DEAD_PEER_SECONDS = 2
addresses._KEEPALIVE_SECONDS, addresses._KEEPALIVE_PROBES = 1, 1
from tests.effects.cluster.test_tcp_links import Outside, linked, run, soon

outside = Outside(Path(tempfile.mkdtemp()))
outside.network.port = outside.sock.getsockname()

async def test(api_server):
    await soon(linked(api_server))
    ip("link", "set", "lo", "down")
    began = time.monotonic()
    await soon(lambda: not linked(api_server)())
    await soon(lambda: not outside.host._sessions)
    print("noticed", time.monotonic() - began, flush=True)
    ip("link", "set", "lo", "up")
    await soon(linked(api_server))
    print("back", flush=True)

run(outside, test, evolve(OTHER_MACHINE, silence=60))  # the system has to notice it
outside.close()
"""


@pytest.mark.long
def test_both_ends_notice_a_cable_that_is_pulled() -> None:
    in_namespace = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*in_namespace, "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    began = time.monotonic()
    ran = subprocess.run(
        [*in_namespace, sys.executable, "-c", CABLE], capture_output=True, text=True
    )
    noticed, back = ran.stdout.splitlines() or ("", ran.stderr)
    assert noticed.startswith("noticed"), ran.stderr
    assert float(noticed.split()[1]) < 6
    assert back == "back"
    assert time.monotonic() - began < 30
