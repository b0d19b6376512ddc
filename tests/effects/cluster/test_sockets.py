"""Links on real sockets: none waits for an API server, and none ends the
others' links.
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

from minfer.effects.cluster.engine_client.link_client import (
    SAME_MACHINE,
    LinkClient,
    LinkedEngine,
    keep_linked,
)
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_server import link_server
from minfer.effects.cluster.engine_server.engine_server import (
    API_SERVER_RETURN_SECONDS,
    EngineServer,
)
from minfer.effects.cluster.engine_server.link_server import LinkServer
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_terms import own_terms
from minfer.effects.live.client import TurnOutputs
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.framing import frame
from minfer.effects.net.handshake import Terms, accept_handshake
from minfer.records.messages import Admitted
from tests.effects.cluster.ends import READY, MadeUp, names_of, request
from tests.effects.cluster.plain import plain
from tests.effects.waiting import soon, until

TOKEN = 100_000  # five bytes on the line


@define(eq=False)
class Served:
    """An engine's end that listens."""

    path: Path
    engine: MadeUp = field(factory=MadeUp)
    why: list[str] = field(factory=list)
    host: EngineServer = field(init=False)
    server: LinkServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.host = EngineServer(2, self.why.append)
        self.server = LinkServer(self.host)
        self.server.start()
        self.server.accept_links(listen_at(self.path), own_terms())
        self.host.open(self.engine, READY)
        self.engine.now = 2 * API_SERVER_RETURN_SECONDS  # no API server is waited for

    def links(self) -> int:
        return len(self.host._sessions)

    def batch(self, name: str, times: int, tokens: int = 1) -> None:
        """So many turns' news of a request."""
        for _ in range(times):
            news = TurnOutputs(time=0.0, ids=((name, 0),), tokens=((TOKEN,) * tokens,))
            self.engine.say(news)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    started = Served(tmp_path / "engine")
    yield started
    started.server.close()


OWN = own_terms()
HELLO = wire.ApiServerHello(0, 1, 0, ())
OTHER = wire.ApiServerHello(1, 1, 0, ())


@pytest.mark.long
def test_a_front_that_sleeps_never_blocks_the_engine(served: Served) -> None:
    with (
        plain(served.path, HELLO, wire.SubmitRequests((request("a"),))) as sleeper,
        plain(served.path, OTHER, wire.SubmitRequests((request("b"),))) as awake,
    ):
        until(lambda: len(served.engine.served) == 2)
        # 15 MB, and a socket takes some hundred kilobytes: waiting would never end.
        served.batch("a", 300, 10_000)
        served.batch("b", 1)
        awake.socket.settimeout(5)
        while not any(
            isinstance(message, wire.ApiServerOutputs) for message in awake.hear()
        ):
            pass
        # Who wakes up gets all of it, in order.
        rows = 0
        sleeper.socket.settimeout(5)
        while rows < 300:
            rows += sum(
                isinstance(message, wire.ApiServerOutputs) for message in sleeper.hear()
            )


@pytest.mark.long
def test_what_waits_is_sent_as_soon_as_the_socket_takes_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_server, "TICK_SECONDS", 60.0)  # it must not wait for that
    with plain(served.path, HELLO, wire.SubmitRequests((request("a"),))) as api_server:
        until(lambda: len(served.engine.served) == 1)
        time.sleep(0.15)  # the thread has begun a long wait
        served.batch("a", 100, 10_000)
        rows = 0
        api_server.socket.settimeout(5)
        while rows < 100:
            rows += sum(
                isinstance(one, wire.ApiServerOutputs) for one in api_server.hear()
            )


def test_a_front_that_takes_nothing_any_more_is_cut(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_server, "MAX_UNSENT_BYTES", 2**20)
    with plain(served.path, HELLO, wire.SubmitRequests((request("a"),))) as sleeper:
        until(lambda: len(served.engine.served) == 1)
        served.batch("a", 60, 10_000)
        until(lambda: served.links() == 0)
        assert served.engine.cancelled == ["a"]
        assert "takes nothing any more" in caplog.text
        assert sleeper.is_cut()
    served.batch("a", 3)  # it is not received, and nothing is kept


NOISE = frame(b"noise")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", wire.MAX_MESSAGE_BYTES + 1),
        NOISE,
        frame(wire.encode(HELLO)) * 2,  # doubled
        frame(wire.encode(wire.SubmitRequests((request("z"),)))),  # no hello
        frame(b"\x82\xa4type\xa5reset\xa1x" + b"\x91" * 200_000),
    ],
    ids=["length", "noise", "doubled", "no hello", "deep"],
)
def test_only_a_front_with_wrong_messages_is_cut(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(served.path, OTHER, wire.SubmitRequests((request("b"),))) as good:
        until(lambda: "b" in served.engine.served)
        with plain(served.path) as bad:
            bad.socket.sendall(data)
            assert bad.is_cut()
        until(lambda: served.links() == 1)
        assert caplog.text.count("an API server's link is cut") == 1
        assert "Traceback" not in caplog.text
        good.say(wire.SubmitRequests((request("c"),)))
        until(lambda: "c" in served.engine.served)
    assert not served.why


def test_a_front_that_goes_in_the_middle_of_a_message_is_gone(served: Served) -> None:
    message = frame(wire.encode(wire.SubmitRequests((request("b"),))))
    with plain(served.path, HELLO, wire.SubmitRequests((request("a"),))) as api_server:
        api_server.socket.sendall(message[:-1])
        until(lambda: "a" in served.engine.served)
    until(lambda: served.links() == 0)
    assert served.engine.cancelled == ["a"]
    assert "b" not in served.engine.served


@pytest.mark.parametrize("error", [KeyError, OSError, BlockingIOError])
def test_a_fault_of_ours_in_one_link_ends_only_it(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def broken(*_: object) -> None:
        raise error("a fault")

    with plain(served.path, HELLO) as bad, plain(served.path, OTHER) as good:
        until(lambda: not served.host._missing)
        monkeypatch.setattr(served.host, "_cancel", broken)
        bad.say(wire.CancelRequests(("a",)))
        assert bad.is_cut()
        assert "Traceback" in caplog.text
        good.say(wire.SubmitRequests((request("c"),)))
        until(lambda: "c" in served.engine.served)
    assert not served.why


def test_a_thread_that_breaks_ends_the_engine(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("a fault")

    with plain(served.path, HELLO) as api_server:
        monkeypatch.setattr(served.host, "tick", broken)
        until(lambda: bool(served.why))
        assert served.why == ["the thread of the links broke: KeyError('a fault')"]
        assert "Traceback" in caplog.text
        assert api_server.is_cut()


@pytest.mark.long
def test_links_that_come_and_go_leave_no_descriptor_behind(tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    served = Served(tmp_path / "engine")
    for number in range(20):
        with plain(served.path, wire.ApiServerHello(0, number, 0, ())):
            until(lambda: served.links() == 1)
        until(lambda: served.links() == 0)
    served.server.close()
    served.server.wake()  # a late engine's word reaches no end, and harms none
    assert (descriptors(), threading.active_count()) == (before, threads)


# --- an API server's end ----------------------------------------------------------------


def api_server(
    path: Path, test: Callable[[RemoteEngine], Any], terms: Terms = OWN
) -> Any:
    """Run a test in an event loop, with a remote that is kept linked."""
    engine = LinkedEngine(
        replica=0, find=lambda: path, terms=terms, name="a", settings=SAME_MACHINE
    )

    async def run() -> Any:
        remote = RemoteEngine(0)
        task = asyncio.create_task(keep_linked(remote, engine))
        try:
            return await test(remote)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.01)  # the socket is closed

    return asyncio.run(run())


@pytest.mark.long
def test_a_front_waits_for_an_engine_and_then_for_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "engine"

    async def test(remote: RemoteEngine) -> None:
        heard: list[Any] = []
        remote.listen(heard.append)
        remote.submit([request("a")])
        await asyncio.sleep(0.1)
        assert remote.unready == "waiting for the engine"
        first = Served(path)
        await soon(lambda: not remote.unready)
        await soon(lambda: bool(first.engine.served))
        (name,) = first.engine.served
        first.batch(name, 2)
        await soon(lambda: len(heard) == 2)
        await asyncio.to_thread(first.server.close)
        await soon(lambda: remote.unready == "waiting for the engine")
        second = Served(path)
        await soon(lambda: bool(second.engine.served))
        (continued,) = second.engine.served.values()
        assert continued.output == (TOKEN, TOKEN)
        assert remote.links == 2
        await asyncio.to_thread(second.server.close)

    api_server(path, test)


@pytest.mark.long
def test_what_no_engine_says_cuts_the_link_and_another_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine"
    with listen_at(path) as listener:
        times: list[float] = []

        def babble() -> None:
            for _ in range(4):
                link, _ = listener.accept()
                with link:
                    times.append(time.monotonic())
                    accept_handshake(link, OWN)
                    link.sendall(NOISE)
                    link.settimeout(5)
                    with contextlib.suppress(OSError):
                        while link.recv(2**16):
                            pass

        thread = threading.Thread(target=babble)
        thread.start()

        async def test(remote: RemoteEngine) -> None:
            await soon(lambda: len(times) == 4)
            await soon(lambda: remote.links == 4)

        api_server(path, test)
        thread.join()
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert min(gaps) > SAME_MACHINE.retry / 2, "an engine that cuts must not be pestered"
    assert caplog.text.count("the link to the engine is cut") >= 3
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def link_to(remote: RemoteEngine, path: Path) -> tuple[LinkClient, socket.socket]:
    """An API server's end of a link, and the engine's end, which says nothing
    by itself.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        loop = asyncio.get_running_loop()
        _, client = await loop.create_unix_connection(
            lambda: LinkClient(remote, 0), str(path)
        )
        engine, _ = listener.accept()
    return client, engine


def test_a_link_is_over_also_if_what_follows_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    async def go() -> None:
        remote = RemoteEngine(0)
        client, engine = await link_to(remote, tmp_path / "engine")
        monkeypatch.setattr(remote, "disconnect", broken)
        engine.close()
        async with asyncio.timeout(5):
            await client.over

    asyncio.run(go())


def test_an_unreadable_message_is_no_death_of_its_engine(tmp_path: Path) -> None:
    async def go() -> int:
        remote = RemoteEngine(0)
        remote.submit([request("a")])
        client, engine = await link_to(remote, tmp_path / "engine")
        with engine:
            (name,) = names_of(remote)
            reason = wire.AdmittedReason(Admitted(name, 0, 0.0, 0, 3))
            outputs = wire.ApiServerOutputs(0.0, reasons=(reason,))
            for message in (READY, outputs):
                engine.sendall(frame(wire.encode(message)))
            engine.sendall(NOISE)
            async with asyncio.timeout(5):
                await client.over
        (record,) = remote._requests.all()
        return record.deaths

    assert asyncio.run(go()) == 0


def test_a_front_of_another_version_is_refused_by_it_and_both_say_so_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(remote: RemoteEngine) -> None:
        await asyncio.sleep(4 * SAME_MACHINE.retry)
        assert not remote.links

    api_server(served.path, test, evolve(OWN, version="0"))
    messages = [
        record.message for record in caplog.records if record.levelno == logging.WARNING
    ]
    reason = f"version {OWN.version} is spoken, not 0"
    assert sorted(messages) == [  # two threads log them
        f"an API server is refused: {reason}",
        f"the engine at engine cannot be used: it refuses: {reason!r}",
    ]
    with plain(served.path, HELLO):
        until(lambda: served.links() == 1)


def test_what_an_engine_sent_before_it_died_is_read_though_a_write_fails_first(
    tmp_path: Path,
) -> None:
    """Its last message may say that it serves another request alone."""
    path = tmp_path / "engine"
    heard: list[wire.ToApiServer] = []
    remote = RemoteEngine(0)
    receive = remote.receive

    def note(message: wire.ToApiServer, replica: int = 0) -> None:
        heard.append(message)
        receive(message, replica)

    remote.receive = note  # type: ignore[method-assign]  # it listens in

    async def go() -> None:
        client, engine = await link_to(remote, path)
        # From here on, the event loop does not run until the API server has written.
        engine.sendall(frame(wire.encode(wire.ProbingRequest("a"))))
        engine.close()
        client._send(wire.ResetCache())
        await client.over

    asyncio.run(go())
    assert heard == [wire.ProbingRequest("a")]
